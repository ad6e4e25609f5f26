"""What the law holds to, whatever it is given."""

from __future__ import annotations

import math

import msgspec
from antiphon_policy.latency import StepModel
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import (
    ArrivalCounts,
    PoolMemory,
    PoolView,
    Promise,
    RequestSample,
    ScalingAction,
    ScalingDecision,
    ScalingInputs,
    ScalingMemory,
    TpotTarget,
    TtftTarget,
    Wanted,
    decide,
)
from antiphon_policy.scaling.cleaning import cleaned
from hypothesis import given, settings
from hypothesis import strategies as st

NOW_MS = 1_000_000.0

numbers = st.one_of(
    st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf, 1e300]), st.floats(0.0, 2e6, allow_nan=False)
)
whole = st.one_of(st.sampled_from([0, -1, -(10**9), 10**15]), st.integers(0, 3000))
times = st.one_of(st.none(), numbers)
sizes = st.integers(-2, 14)

steps = st.builds(StepModel, numbers, numbers, numbers, numbers, numbers) | st.builds(
    StepModel, st.floats(0.0, 20.0), st.floats(0.0, 1.0), st.just(0.0), st.floats(0.0, 0.2), st.just(1e-5)
)
samples = st.builds(
    RequestSample,
    st.floats(NOW_MS - 90_000.0, NOW_MS) | numbers,
    whole,
    whole,
    whole,
    st.floats(0.1, 4.0) | numbers,
    times,
    times,
    st.none() | whole,
)


def views(role: WorkerRole) -> st.SearchStrategy[PoolView]:
    return st.builds(
        PoolView,
        role=st.just(role),
        size=sizes,
        ready=sizes,
        starting_ms=st.lists(numbers, max_size=3).map(tuple),
        draining=st.integers(-1, 3),
        floor=st.integers(0, 3),
        ceiling=st.integers(0, 12),
        step=steps,
        chunk_tokens=whole,
        max_sequences=whole,
        kv_capacity_tokens=whole,
        start_ms=numbers,
        drain_ms=numbers,
        queued_tokens=whole,
        queued_requests=st.integers(-1, 5),
        running=whole,
        kv_tokens=whole,
        devices=st.integers(1, 4),
        shape=st.sampled_from(["", "a"]),
        edits=st.integers(0, 3),
    )


memories = st.builds(
    PoolMemory,
    st.sampled_from(list(WorkerRole)),
    since_ms=times,
    wanted=st.lists(st.builds(Wanted, numbers, sizes), max_size=4).map(tuple),
    added_ms=times,
    removed_ms=times,
    removed_rps=numbers,
    relapses=st.integers(-1, 9),
    edits=st.none() | st.integers(0, 3),
    edited_ms=times,
)

anything = st.builds(
    ScalingInputs,
    now_ms=st.just(NOW_MS) | numbers,
    promise=st.builds(
        Promise,
        st.none() | st.builds(TtftTarget, numbers, numbers, st.sampled_from([0.5, 0.95, 0.99]) | numbers),
        st.none() | st.builds(TpotTarget, numbers, st.sampled_from([0.5, 0.95, 0.99]) | numbers),
        st.just(60.0) | numbers,
    ),
    pools=st.tuples(views(WorkerRole.PREFILL), views(WorkerRole.DECODE)) | st.tuples(views(WorkerRole.BOTH)),
    samples=st.lists(samples, max_size=12).map(tuple),
    news_age_ms=st.just(0.0) | times,
    arrivals=st.builds(
        ArrivalCounts, st.just(NOW_MS) | numbers, numbers, st.lists(numbers, max_size=20).map(tuple), numbers
    ),
    budget_devices=st.none() | st.integers(-1, 30),
    may_switch=st.booleans(),
    memory=st.builds(ScalingMemory, st.lists(memories, max_size=3).map(tuple), times),
)


def floors_of(inputs: ScalingInputs) -> list[int]:
    return [max(0, pool.floor) for pool in inputs.pools]


@settings(max_examples=60)
@given(anything)
def test_sizes_are_within_bounds_and_budget_and_garbage_replays_too(inputs: ScalingInputs) -> None:
    decision = decide(inputs)
    for pool, floor, given_pool in zip(decision.sizes, floors_of(inputs), inputs.pools, strict=True):
        assert floor <= pool.size <= max(floor, given_pool.ceiling)
    if inputs.budget_devices is not None:
        taken = sum(size.size * pool.devices for size, pool in zip(decision.sizes, inputs.pools, strict=True))
        least = sum(floor * pool.devices for floor, pool in zip(floors_of(inputs), inputs.pools, strict=True))
        assert taken <= max(inputs.budget_devices, least)
    read = msgspec.json.decode(msgspec.json.encode(decision), type=ScalingDecision)
    assert read == decision
    assert read.inputs is not None
    assert decide(read.inputs) == decision
    assert cleaned(read.inputs) == read.inputs


@settings(max_examples=30)
@given(anything, st.none() | st.floats(10_000.0, 1e9) | st.just(math.nan))
def test_without_news_nothing_moves_but_what_the_bounds_demand(inputs: ScalingInputs, age_ms: float | None) -> None:
    promise = msgspec.structs.replace(inputs.promise, window_s=60.0)
    inputs = msgspec.structs.replace(inputs, news_age_ms=age_ms, budget_devices=None, promise=promise)
    decision = decide(inputs)
    assert decision.action is ScalingAction.FREEZE
    for size, pool, floor in zip(decision.sizes, inputs.pools, floors_of(inputs), strict=True):
        assert size.size == min(max(pool.size, floor), max(floor, pool.ceiling))


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.floats(1.0, 60_000.0), st.integers(1, 2000), st.integers(2, 100)), min_size=1, max_size=30),
    st.integers(1, 3),
    st.integers(0, 20_000),
)
def test_more_load_never_asks_for_fewer(load: list[tuple[float, int, int]], times: int, queued: int) -> None:
    """The same requests several times over, each with its twins at its side."""

    def needed(times: int, queued: int) -> list[int]:
        promise = Promise(TtftTarget(400.0, 300.0), TpotTarget(30.0), 60.0)
        pools = tuple(
            PoolView(role, 2, 2, ceiling=40, queued_tokens=queued if role is WorkerRole.PREFILL else 0)
            for role in (WorkerRole.PREFILL, WorkerRole.DECODE)
        )
        came = [
            RequestSample(60_000.0 - back_ms, new, new, out)
            for back_ms, new, out in sorted(load, reverse=True)
            for _ in range(times)
        ]
        counts = [0.0] * 6
        for sample in came:
            counts[min(5, int(sample.at_ms // 10_000.0))] += 1.0
        arrivals = ArrivalCounts(60_000.0, 10_000.0, tuple(counts))
        decision = decide(ScalingInputs(60_000.0, promise, pools, tuple(came), arrivals=arrivals))
        return [size.size for size in decision.sizes]

    light, heavy = needed(1, queued), needed(1 + times, 2 * queued)
    assert all(more >= less for more, less in zip(heavy, light, strict=True))
