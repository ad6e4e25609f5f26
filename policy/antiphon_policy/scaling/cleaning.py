"""Inputs as the law may trust them: finite, not negative, in bounds of reason, and as JSON can carry them.

Whoever measures may be wrong in any way: a mean of nothing is NaN, a clock may have jumped, a counter may have wrapped.
None of it may size a pool. What says nothing is left out (a sample, counts); what must have a value gets one from which
nothing bad follows (a time of NaN is that of the default). The decision carries the cleaned inputs, so it replays.
"""

from __future__ import annotations

import math

import msgspec

from antiphon_policy.latency import StepModel
from antiphon_policy.scaling.records import (
    MOST_SAMPLES,
    ArrivalCounts,
    PoolMemory,
    PoolView,
    Promise,
    RequestSample,
    ScalingInputs,
    ScalingMemory,
    TpotTarget,
    TtftTarget,
)

MOST_REPLICAS = 1000
MOST_TOKENS = 10_000_000
_MOST_MS = 86_400_000.0
_LEAST_WINDOW_S, _MOST_WINDOW_S = 10.0, 86_400.0
_MOST_COUNTS = 20_000
_MOST_REQUESTS = 1e9
_MOST_WEIGHT = 1e6


def cleaned(inputs: ScalingInputs) -> ScalingInputs:
    """The same again if it is sane already: cleaning what is clean changes nothing."""
    now_ms = _number(inputs.now_ms, 0.0, low=-1e15, high=1e15)
    promise = _promise(inputs.promise)
    begins_ms = now_ms - promise.window_s * 1000.0
    samples = [one for sample in inputs.samples if (one := _sample(sample, begins_ms, now_ms)) is not None]
    budget = inputs.budget_devices
    age_ms = inputs.news_age_ms
    return ScalingInputs(
        now_ms=now_ms,
        promise=promise,
        pools=tuple(_pool(pool) for pool in inputs.pools),
        samples=tuple(samples[-MOST_SAMPLES:]),
        news_age_ms=None if age_ms is None or not math.isfinite(age_ms) else max(0.0, age_ms),
        arrivals=_arrivals(inputs.arrivals),
        budget_devices=None if budget is None else max(0, int(_number(budget, 0.0))),
        may_switch=inputs.may_switch,
        memory=_memory(inputs.memory, now_ms),
    )


def _number(value: float, default: float, *, low: float = 0.0, high: float = 1e12) -> float:
    return min(max(float(value), low), high) if math.isfinite(value) else default


def _count(value: float, default: int = 0, *, low: int = 0, high: int = MOST_TOKENS) -> int:
    return int(_number(value, default, low=low, high=high))


def _optional(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) or value < 0.0 else min(value, _MOST_MS)


def _promise(promise: Promise) -> Promise:
    ttft, tpot = promise.ttft, promise.tpot
    if ttft is not None:
        base_ms = _number(ttft.base_ms, 0.0, high=_MOST_MS)
        slope_ms = _number(ttft.per_thousand_tokens_ms, 0.0, high=_MOST_MS)
        ttft = TtftTarget(base_ms, slope_ms, _percentile(ttft.percentile)) if base_ms + slope_ms > 0.0 else None
    if tpot is not None:
        limit_ms = _number(tpot.limit_ms, 0.0, high=_MOST_MS)
        tpot = TpotTarget(limit_ms, _percentile(tpot.percentile)) if limit_ms > 0.0 else None
    window_s = _number(promise.window_s, 300.0, low=_LEAST_WINDOW_S, high=_MOST_WINDOW_S)
    return Promise(ttft, tpot, window_s)


def _percentile(value: float) -> float:
    return value if math.isfinite(value) and 0.0 < value < 1.0 else 0.95


def _sample(sample: RequestSample, begins_ms: float, now_ms: float) -> RequestSample | None:
    """None: it is of another time, or stands for nothing."""
    if not (math.isfinite(sample.at_ms) and math.isfinite(sample.weight) and sample.weight > 0.0):
        return None
    if not begins_ms <= sample.at_ms <= now_ms:
        return None
    if _is_clean(sample):
        # Nearly all are, and there are thousands.
        return sample
    least = sample.least_uncached_tokens
    return RequestSample(
        at_ms=sample.at_ms,
        uncached_tokens=_count(sample.uncached_tokens),
        prompt_tokens=_count(sample.prompt_tokens),
        output_tokens=_count(sample.output_tokens),
        weight=min(sample.weight, _MOST_WEIGHT),
        ttft_ms=_optional(sample.ttft_ms),
        tpot_ms=_optional(sample.tpot_ms),
        least_uncached_tokens=None if least is None else _count(least),
    )


def _is_clean(sample: RequestSample) -> bool:
    uncached, prompt, output = sample.uncached_tokens, sample.prompt_tokens, sample.output_tokens
    least, ttft_ms, tpot_ms = sample.least_uncached_tokens, sample.ttft_ms, sample.tpot_ms
    return (
        type(uncached) is int
        and type(prompt) is int
        and type(output) is int
        and 0 <= uncached <= MOST_TOKENS
        and 0 <= prompt <= MOST_TOKENS
        and 0 <= output <= MOST_TOKENS
        and sample.weight <= _MOST_WEIGHT
        and (least is None or (type(least) is int and 0 <= least <= MOST_TOKENS))
        and (ttft_ms is None or 0.0 <= ttft_ms <= _MOST_MS)
        and (tpot_ms is None or 0.0 <= tpot_ms <= _MOST_MS)
    )


def _pool(pool: PoolView) -> PoolView:
    floor = _count(pool.floor, 1, high=MOST_REPLICAS)
    start_ms = _number(pool.start_ms, 60_000.0, low=1.0, high=_MOST_MS)
    default = StepModel()
    return msgspec.structs.replace(
        pool,
        size=_count(pool.size, high=MOST_REPLICAS),
        ready=_count(pool.ready, high=MOST_REPLICAS),
        starting_ms=tuple(_number(left, start_ms, high=_MOST_MS) for left in pool.starting_ms[:MOST_REPLICAS]),
        draining=_count(pool.draining, high=MOST_REPLICAS),
        floor=floor,
        ceiling=max(floor, _count(pool.ceiling, floor, high=MOST_REPLICAS)),
        step=StepModel(
            base_ms=_number(pool.step.base_ms, default.base_ms, high=_MOST_MS),
            per_new_token_ms=_number(pool.step.per_new_token_ms, default.per_new_token_ms, high=_MOST_MS),
            per_token_context_ms=_number(pool.step.per_token_context_ms, 0.0, high=1.0),
            per_sequence_ms=_number(pool.step.per_sequence_ms, default.per_sequence_ms, high=_MOST_MS),
            per_kv_token_ms=_number(pool.step.per_kv_token_ms, default.per_kv_token_ms, high=1.0),
        ),
        chunk_tokens=_count(pool.chunk_tokens, 512, low=1),
        max_sequences=_count(pool.max_sequences, 256, low=1),
        kv_capacity_tokens=_count(pool.kv_capacity_tokens, 1_000_000, low=1, high=10**12),
        start_ms=start_ms,
        drain_ms=_number(pool.drain_ms, 30_000.0, high=_MOST_MS),
        queued_tokens=_count(pool.queued_tokens, high=10**9),
        queued_requests=_count(pool.queued_requests),
        running=_count(pool.running),
        kv_tokens=_count(pool.kv_tokens, high=10**12),
        devices=_count(pool.devices, 1, low=1, high=MOST_REPLICAS),
        edits=_count(pool.edits, high=10**12),
    )


def _arrivals(arrivals: ArrivalCounts) -> ArrivalCounts:
    if not (math.isfinite(arrivals.bucket_ms) and arrivals.bucket_ms >= 1.0 and math.isfinite(arrivals.end_ms)):
        return ArrivalCounts()
    period_ms = arrivals.period_ms if math.isfinite(arrivals.period_ms) and arrivals.period_ms > 0.0 else 86_400_000.0
    counts = tuple(_number(count, 0.0, high=_MOST_REQUESTS) for count in arrivals.counts[-_MOST_COUNTS:])
    return ArrivalCounts(arrivals.end_ms, arrivals.bucket_ms, counts, period_ms)


def _memory(memory: ScalingMemory, now_ms: float) -> ScalingMemory:
    """What lies in the future did not happen: the clock was set back, or another one counts now."""

    def past(time_ms: float | None) -> float | None:
        return None if time_ms is None or not math.isfinite(time_ms) or time_ms > now_ms else time_ms

    pools = tuple(
        PoolMemory(
            role=pool.role,
            since_ms=past(pool.since_ms),
            wanted=tuple(one for one in pool.wanted if math.isfinite(one.at_ms) and one.at_ms <= now_ms),
            added_ms=past(pool.added_ms),
            added_rps=_number(pool.added_rps, 0.0),
            removed_ms=past(pool.removed_ms),
            removed_rps=_number(pool.removed_rps, 0.0),
            relapses=_count(pool.relapses, high=10),
            edits=pool.edits,
            edited_ms=past(pool.edited_ms),
        )
        for pool in memory.pools
    )
    return ScalingMemory(pools, past(memory.active_ms))
