"""How many replicas each pool needs, before anybody asks whether it may have them.

Four answers, of which the largest counts:

    now      the fewest that keep the percentile for the window's requests at the middle of what is foreseen (`replay`)
    ahead    the same over all that may come, each rate as often as the errors of the past say       (`outlook`),
             and room for a burst like that of late                                                (`surprises`)
    queue    the fast loop: what is queued or running at this moment, which no percentile knows yet   (`queues`)
    seen     one more than there are, if too many were served late at this size                     (`observed`)

Where arrivals were not counted, nothing is foreseen, and the window as it was takes the place of the first two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling.forecast import Forecast, forecast
from antiphon_policy.scaling.observed import seen_late
from antiphon_policy.scaling.outlook import Outlook
from antiphon_policy.scaling.queues import answers_now, answers_then, prompts_now
from antiphon_policy.scaling.records import PoolView, Promise, ScalingInputs
from antiphon_policy.scaling.replay import SURELY, UNPROMISED, Replay, fewest
from antiphon_policy.scaling.work import Window, retimed, window_of

_LEAST_RPS = 1e-6

_ROOM_SHARE = 0.1
"""Standing room for a burst: so much of the pool, one replica at least."""


@dataclass(frozen=True, slots=True)
class Need:
    """Of one pool."""

    pool: PoolView
    now: int
    ahead: int
    queue: int
    seen: int
    """More than there are, where too many were served late though they should not have been; else 0."""
    surely: int
    """What it may shrink to at this moment: keeps what may come with at most three quarters of what may be late."""
    load: Replay
    """The heaviest of what may come, or the window as it was where nothing is foreseen."""
    usual: Replay
    """The middle of what may come, of which the decision tells what is predicted."""
    foreseen: Forecast

    @property
    def replicas(self) -> int:
        return max(self.now, self.ahead, self.queue, self.seen)


@dataclass(frozen=True, slots=True)
class Needs:
    pools: tuple[Need, ...]
    window: Window


def needs_of(inputs: ScalingInputs) -> Needs:
    """Of cleaned inputs. A need above a pool's ceiling is told as ceiling + 1."""
    prompts_on, answers_on = work_places(inputs.pools)
    window = window_of(inputs.samples, inputs.now_ms, inputs.promise, prompts_on, answers_on)
    counts = inputs.arrivals
    known = counts.end_ms >= inputs.now_ms - max(2.0 * counts.bucket_ms, window.length_ms / 10.0)
    foreseen: dict[float, Forecast] = {}
    found = []
    windows = _Windows(window)
    for pool in inputs.pools:
        if pool.start_ms not in foreseen:
            foreseen[pool.start_ms] = forecast(counts, pool.start_ms) if known else Forecast()
        found.append(_need(pool, windows, foreseen[pool.start_ms], inputs))
    if prompts_on is not answers_on:
        prompts = next(need for need in found if need.pool is prompts_on)
        found = [_rushed(need, prompts, window, inputs.promise) if need is not prompts else need for need in found]
    return Needs(tuple(found), window)


class _Windows:
    """The window at the rates that are foreseen: pools that start as fast as each other share them."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self._found: dict[float, Window] = {}

    def at(self, rps: float) -> Window:
        if rps not in self._found:
            self._found[rps] = retimed(self.window, rps)
        return self._found[rps]


def work_places(pools: tuple[PoolView, ...]) -> tuple[PoolView, PoolView]:
    """(where prompts are computed, where answers are decoded)."""
    prompts_on = next((pool for pool in pools if pool.role is not WorkerRole.DECODE), pools[0])
    answers_on = next((pool for pool in pools if pool.role is not WorkerRole.PREFILL), pools[0])
    return prompts_on, answers_on


def _need(pool: PoolView, windows: _Windows, foreseen: Forecast, inputs: ScalingInputs) -> Need:
    window = windows.window
    promise, most = inputs.promise, max(1, pool.ceiling)
    chance = _chance(window, promise)
    if window.work and foreseen.spread and foreseen.spread[0][1] > _LEAST_RPS:
        coming = _outlook(windows, foreseen, pool, promise)
        ahead = coming.fewest(pool.size, most, chance)
        ahead = _with_room(ahead, windows, foreseen, pool, promise, chance)
        surely = coming.fewest(ahead, most, SURELY)
        now = fewest(lambda workers: coming.middle.keeps(workers, chance), ahead, ahead)
        load, usual = coming.heaviest, coming.middle
    else:
        load = usual = Replay(window, pool, promise)
        now, ahead = load.fewest(pool.size, most, chance), 0
        surely = load.fewest(now, most, SURELY)
    queue = 0
    if pool.role is not WorkerRole.DECODE:
        queue = prompts_now(pool, window, foreseen, promise)
    if pool.role is not WorkerRole.PREFILL:
        queue = max(queue, answers_now(pool, promise))
    queue = min(queue, most + 1)
    seen = min(seen_late(pool, window, inputs), most + 1)
    return Need(pool, now, ahead, queue, seen, max(surely, queue, seen), load, usual, foreseen)


def _rushed(need: Need, prompts: Need, window: Window, promise: Promise) -> Need:
    """The answers' need, with those of the prompts that queue now."""
    size = min(max(prompts.pool.size, prompts.replicas), max(1, prompts.pool.ceiling))
    then = answers_then(need.pool, prompts.pool, size, window, prompts.foreseen, promise)
    return replace(need, queue=max(need.queue, then), surely=max(need.surely, then)) if then else need


def _chance(window: Window, promise: Promise) -> float:
    """What the late may be by chance, as a multiple of those that may be: one standard deviation more. A few requests
    say little, and one that is late among them asks for no worker."""
    percentile = max((target.percentile for target in (promise.ttft, promise.tpot) if target), default=UNPROMISED)
    may_be = (1.0 - percentile) * window.weight
    return 1.0 + 1.0 / math.sqrt(max(may_be, 1e-9))


def _outlook(windows: _Windows, foreseen: Forecast, pool: PoolView, promise: Promise) -> Outlook:
    return Outlook(
        [
            (share * rps, partial(_replay, windows, rps, pool, promise))
            for share, rps in foreseen.spread
            if rps > _LEAST_RPS
        ]
    )


def _with_room(
    ahead: int, windows: _Windows, foreseen: Forecast, pool: PoolView, promise: Promise, chance: float
) -> int:
    """With room for a burst like that of late, if it would need it: only who stands there helps then, and how many that
    would take is dear, so it is one replica or a tenth."""
    if not 1 <= ahead < pool.ceiling or foreseen.burst_rps <= foreseen.spread[0][1]:
        return ahead
    if _replay(windows, foreseen.burst_rps, pool, promise).keeps(ahead, chance):
        return ahead
    return min(pool.ceiling, ahead + max(1, round(_ROOM_SHARE * ahead)))


def _replay(windows: _Windows, rps: float, pool: PoolView, promise: Promise) -> Replay:
    return Replay(windows.at(rps), pool, promise)
