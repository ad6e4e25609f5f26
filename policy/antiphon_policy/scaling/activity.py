"""Whether anybody asks for anything. Zero traffic is data: it takes pools to their floor, and to sleep where that is 0.

A pool is *idle* if there has been no request for ten times as long as a worker takes to start, one minute at least and
a quarter of an hour at most: whoever comes after that waits for one start, which is then a tenth of the pause at most.
"""

from __future__ import annotations

from antiphon_policy.scaling.records import PoolView, ScalingInputs

IDLE_STARTS = 10.0
LEAST_IDLE_MS = 60_000.0
MOST_IDLE_MS = 900_000.0


def idle_after_ms(pool: PoolView) -> float:
    return min(max(IDLE_STARTS * pool.start_ms, LEAST_IDLE_MS), MOST_IDLE_MS)


def has_work(pool: PoolView) -> bool:
    return pool.queued_requests > 0 or pool.queued_tokens > 0 or pool.running > 0


def last_active_ms(inputs: ScalingInputs) -> float | None:
    """When there last was a request, as far as is known. A pool that is awake and of which nothing is known has been
    used just now; one that sleeps has not."""
    if any(has_work(pool) for pool in inputs.pools):
        return inputs.now_ms
    known = [sample.at_ms for sample in inputs.samples]
    if inputs.memory.active_ms is not None:
        known.append(inputs.memory.active_ms)
    if known:
        return max(known)
    return inputs.now_ms if any(pool.size > 0 for pool in inputs.pools) else None


def is_idle(pool: PoolView, active_ms: float | None, now_ms: float) -> bool:
    return active_ms is None or now_ms - active_ms >= idle_after_ms(pool)
