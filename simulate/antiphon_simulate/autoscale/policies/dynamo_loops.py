"""Dynamo's planner with its target `sla`: a loop by throughput that sets a floor, and one by load above it.

Every 180 s, by throughput (the next interval is taken to be as the last one: its predictor `constant`):

    prefill = ceil(requests/s * time of the mean uncached prompt); where that alone is over TTFT: ceil(time / TTFT) too
    decode  = ceil(requests/s / (B / (answer tokens * step of B)))  with B the largest batch whose step is within TPOT

Every 5 s, by load, one worker at a time and none while the pool changes. With n workers, each with an even share of
what waits and runs:

    prefill up    if TTFT of one more (what waits, then a mean prompt, in chunks) is above its limit
            down  if, with n / (n - 1) of what waits, waiting takes less than 0.8 of what the limit leaves for it
    decode  up    if the step with one more answer is above TPOT
            down  if n / (n - 1) of the contexts fit into KV, and their step is below 0.8 of TPOT

Never below the floor. Source: ai-dynamo/dynamo, components/src/dynamo/planner/core (throughput_scaling.py,
load_scaling.py, perf_model/, config/defaults.py); docs/design-docs/planner-design.md. Its regressions of step times are
the step model itself here, so exact and known from the start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from antiphon_simulate.autoscale.capacity import Profile, batch_within
from antiphon_simulate.autoscale.records import PoolSeen, Seen, Serving, Setting, Sizes, Wish

THROUGHPUT_MS = 180_000.0
LOAD_MS = 5_000.0
SENSITIVITY = 0.8
"""Of what a limit leaves, what survivors may take of it (`load_scaling_down_sensitivity`)."""
MEAN_OF = 64
"""Latest requests that means are taken over (`max_num_fpm_samples`)."""


class DynamoLoops:
    name = "dynamo_loops"
    interval_ms = LOAD_MS

    def __init__(self, setting: Setting, profile: Profile) -> None:
        """`profile`: until requests have come."""
        self._setting = setting
        self._arrived: list[Serving] = []
        self._prompts: deque[float] = deque([profile.uncached_tokens], maxlen=MEAN_OF)
        self._contexts: deque[float] = deque([profile.context_tokens], maxlen=MEAN_OF)
        self._since_ms = 0.0
        self._floor = Sizes(1, 1)
        """What the loop by throughput wants."""

    def decide(self, seen: Seen) -> Wish:
        self._arrived += seen.arrived
        self._prompts.extend(one.call.uncached_tokens for one in seen.arrived[-MEAN_OF:])
        self._contexts.extend(one.call.prompt_tokens + one.call.output_tokens / 2.0 for one in seen.ended[-MEAN_OF:])
        if seen.now_ms - self._since_ms >= THROUGHPUT_MS:
            self._floor = self._by_throughput(self._arrived, seen.now_ms - self._since_ms)
            self._arrived = []
            self._since_ms = seen.now_ms
        prefill, decode = self._prefill_by_load(seen.prefill), self._decode_by_load(seen.decode)
        return Wish(Sizes(max(prefill, self._floor.prefill), max(decode, self._floor.decode)))

    def _by_throughput(self, arrived: Sequence[Serving], interval_ms: float) -> Sizes:
        if not arrived:
            return Sizes(1, 1)
        goal, site, timing = self._setting.goal, self._setting.site, self._setting.timing
        per_ms = len(arrived) / interval_ms
        uncached = _mean([one.call.uncached_tokens for one in arrived])
        output = _mean([one.call.output_tokens for one in arrived])
        context = _mean([one.call.prompt_tokens for one in arrived]) + output / 2.0
        alone_ms, limit_ms = self._alone_ms(uncached), goal.ttft_limit_ms(round(uncached))
        prefill = max(1, math.ceil(per_ms * alone_ms), math.ceil(alone_ms / limit_ms) if alone_ms > limit_ms else 1)
        within = batch_within(timing, goal.tpot_ms, context)
        batch = max(1, math.floor(min(within, site.kv_tokens / context, site.max_running)))
        return Sizes(prefill, max(1, math.ceil(per_ms * output * self._step_ms(batch, batch * context) / batch)))

    def _prefill_by_load(self, pool: PoolSeen) -> int:
        size = pool.wanted
        if not _is_settled(pool):
            return size
        prompt = _mean(self._prompts)
        waiting = max(0, pool.queued_requests - pool.ready) / max(1, pool.queued_requests)
        queued = pool.queued_tokens * waiting / pool.ready
        limit_ms = self._setting.goal.ttft_limit_ms(round(prompt))
        if self._alone_ms(queued + prompt) > limit_ms:
            return size + 1
        own_ms = self._alone_ms(prompt)
        if size > 1 and self._alone_ms(queued * size / (size - 1) + prompt) - own_ms < SENSITIVITY * (
            limit_ms - own_ms
        ):
            return size - 1
        return size

    def _decode_by_load(self, pool: PoolSeen) -> int:
        size = pool.wanted
        if not _is_settled(pool):
            return size
        context = _mean(self._contexts)
        answers = pool.running / pool.ready + 1.0
        kv_tokens = (pool.kv_tokens + pool.queued_requests * context) / pool.ready
        limit_ms = self._setting.goal.tpot_ms
        if self._step_ms(answers, kv_tokens + context) > limit_ms:
            return size + 1
        if size > 1:
            left = kv_tokens * size / (size - 1)
            fits = left < self._setting.site.kv_tokens
            if fits and self._step_ms(answers, left + context) < SENSITIVITY * limit_ms:
                return size - 1
        return size

    def _alone_ms(self, tokens: float) -> float:
        timing = self._setting.timing
        return timing.step.prefill_ms(new_tokens=round(tokens), chunk_tokens=timing.chunk_tokens)

    def _step_ms(self, answers: float, kv_tokens: float) -> float:
        step = self._setting.timing.step
        per_context = step.per_token_context_ms + step.per_kv_token_ms
        return step.base_ms + (step.per_new_token_ms + step.per_sequence_ms) * answers + per_context * kv_tokens


def _is_settled(pool: PoolSeen) -> bool:
    return pool.ready > 0 and not pool.starting_ms and not pool.draining


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
