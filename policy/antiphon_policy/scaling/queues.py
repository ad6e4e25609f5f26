"""The fast loop: what is queued or running at this moment, which no percentile of a window knows yet.

Prompts: what would be left over by the time a worker that is asked for now is ready, with credit for those that start
already. Whoever waits that long is late in any case, and the line takes those who are in time first, so what is left
then has half a window to go:

    left = queued work + arriving work * start - what ready and starting workers do meanwhile
    n    = arriving work + left / (half a window, or a start if that is longer)

With 120 s of prompts queued, 1.5 workers' worth arriving, 2 ready, a start of 60 s and a window of 300 s: left = 120 +
90 - 120 = 90 s, so n = 1.5 + 90 / 150 = 2.1: three.

Answers: a step at the batch that runs now, less what is chance of it, is to keep the limit. And while prompts are left
over like that, answers begin as fast as the prompts' workers compute, not as fast as requests come: that rate, too.
"""

from __future__ import annotations

import math

from antiphon_policy.scaling.answers import mean_sequences
from antiphon_policy.scaling.forecast import Forecast
from antiphon_policy.scaling.records import PoolView, Promise
from antiphon_policy.scaling.replay import fewest
from antiphon_policy.scaling.work import Window, decode_ms, ttft_limit_ms

CLEARED_WINDOWS = 0.5

CHANCE = 2.0
"""Standard deviations of a count of answers that are taken to be chance."""


def prompts_now(pool: PoolView, window: Window, foreseen: Forecast, promise: Promise) -> int:
    queued_ms = pool.queued_tokens * _per_token_ms(pool, window)
    if queued_ms <= 0.0:
        return 0
    weight = window.weight
    tokens = sum(one.uncached_tokens * one.weight for one in window.work) / weight if weight else pool.chunk_tokens
    if pool.ready and queued_ms / pool.ready <= ttft_limit_ms(promise, pool, int(tokens)):
        return 0
    left_ms = _left_ms(pool, window, foreseen)
    cleared_ms = max(pool.start_ms, CLEARED_WINDOWS * 1000.0 * promise.window_s)
    return math.ceil(_arriving(window, foreseen) + left_ms / cleared_ms) if left_ms > 0.0 else 0


def _left_ms(pool: PoolView, window: Window, foreseen: Forecast) -> float:
    """Work that is still queued when a worker that is asked for now is ready; negative: none, and time to spare."""
    start_ms = pool.start_ms
    done_ms = pool.ready * start_ms + sum(max(0.0, start_ms - left_ms) for left_ms in pool.starting_ms)
    return pool.queued_tokens * _per_token_ms(pool, window) + _arriving(window, foreseen) * start_ms - done_ms


def _arriving(window: Window, foreseen: Forecast) -> float:
    """Work, in workers."""
    return _mean_ms(window) * max(foreseen.now_rps, foreseen.ahead_rps) / 1000.0


def _mean_ms(window: Window) -> float:
    """Of a prompt."""
    return sum([one.service_ms * one.weight for one in window.work]) / window.weight if window.work else 0.0


def answers_then(
    pool: PoolView, prompts_on: PoolView, prompts_size: int, window: Window, foreseen: Forecast, promise: Promise
) -> int:
    """Needed while prompts queue that `prompts_size` workers will compute; 0: none will be left."""
    mean_ms = _mean_ms(window)
    if mean_ms <= 0.0 or promise.tpot is None or _left_ms(prompts_on, window, foreseen) <= 0.0:
        return 0
    # The window's requests at the rate of so many workers.
    rushed = Window(window.work, mean_ms * window.weight / max(1, prompts_size))
    limit_ms = promise.tpot.limit_ms

    def keeps(size: int) -> bool:
        if size <= 0:
            return False
        sequences, tokens = mean_sequences(rushed, pool, size)
        if sequences <= 1.0:
            return True
        # As many as a worker can hold: more begin than end.
        is_full = sequences >= pool.max_sequences or tokens >= pool.kv_capacity_tokens
        return not is_full and decode_ms(pool.step, sequences, tokens) <= limit_ms

    return fewest(keeps, pool.size, max(1, pool.ceiling))


def _per_token_ms(pool: PoolView, window: Window) -> float:
    chunk = pool.chunk_tokens
    alone_ms = pool.step.prefill_ms(new_tokens=chunk, chunk_tokens=chunk) / chunk
    tokens = sum(one.uncached_tokens * one.weight for one in window.work)
    spent_ms = sum(one.service_ms * one.weight for one in window.work)
    return spent_ms / tokens if tokens > 0.0 else alone_ms


def answers_now(pool: PoolView, promise: Promise) -> int:
    running = pool.running + pool.queued_requests
    surely = running - CHANCE * math.sqrt(running)
    if surely <= 0.0 or pool.size <= 0:
        return 0
    context = pool.kv_tokens / pool.running if pool.running else 0.0

    def keeps(workers: int) -> bool:
        if workers <= 0:
            return False
        each = max(1.0, surely / workers)
        if each > pool.max_sequences or (each > 1.0 and each * context > pool.kv_capacity_tokens):
            return False
        # One that no worker could serve in time alone asks for no more workers.
        return (
            each == 1.0 or promise.tpot is None or decode_ms(pool.step, each, each * context) <= promise.tpot.limit_ms
        )

    return fewest(keeps, pool.size, max(1, pool.ceiling))
