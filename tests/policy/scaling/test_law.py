"""The law's cases: what it does, and the reason that it gives."""

from __future__ import annotations

from typing import Any

import msgspec
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
    ScalingReason,
    Wanted,
    decide,
)
from antiphon_policy.scaling.patience import CALM_MS
from antiphon_policy.scaling.replay import SURELY, Replay
from antiphon_policy.scaling.work import window_of

from tests.policy.scaling.loop import PROMISE, pair, poisson, pool

NOW_MS = 3_600_000.0
LIGHT = 1.0
HEAVY = 20.0


def requests(rps: float, *, served_ms: float | None = None) -> tuple[RequestSample, ...]:
    """Of the window that ends now."""
    return tuple(
        msgspec.structs.replace(sample, at_ms=sample.at_ms + NOW_MS - 300_000.0, ttft_ms=served_ms)
        for sample in poisson(lambda _: rps, 300.0)[-2000:]
    )


def asked(pools: tuple[PoolView, ...], rps: float = LIGHT, **more: Any) -> ScalingDecision:
    given: dict[str, Any] = {
        "samples": requests(rps) if rps else (),
        "arrivals": ArrivalCounts(NOW_MS, 10_000.0, (10.0 * rps,) * 90),
        **more,
    }
    return decide(ScalingInputs(NOW_MS, PROMISE, pools, **given))


def remembered(size: int, *, since_ms: float = 0.0, until_ms: float = NOW_MS, **more: Any) -> ScalingMemory:
    """So many were needed, up to then."""
    return ScalingMemory(
        tuple(
            PoolMemory(role, since_ms=since_ms, wanted=(Wanted(until_ms, size),), edits=0, **more)
            for role in WorkerRole
        ),
        active_ms=NOW_MS,
    )


def sizes(decision: ScalingDecision) -> tuple[int, ...]:
    return tuple(size.size for size in decision.sizes)


def test_a_load_that_the_pools_cannot_carry_gets_what_it_needs_at_once() -> None:
    decision = asked(pair(1, 1, ceiling=20), HEAVY)
    assert decision.action is ScalingAction.ADD
    assert decision.reason is ScalingReason.PROMISE_NOW
    assert decision.size_of(WorkerRole.PREFILL) >= 4
    assert "prefill 1 -> " in decision.sentence
    assert "requests/s now" in decision.sentence


def test_workers_that_start_count_as_there() -> None:
    wanted = asked(pair(1, 1, ceiling=20), HEAVY)
    again = tuple(
        msgspec.structs.replace(view, size=size.size, starting_ms=(50_000.0,) * (size.size - 1))
        for view, size in zip(pair(1, 1, ceiling=20), wanted.sizes, strict=True)
    )
    assert asked(again, HEAVY, memory=wanted.memory).action is ScalingAction.NONE


def test_a_load_that_grows_gets_its_workers_ahead() -> None:
    ramp = tuple(0.5 * at for at in range(90))
    level = asked(pair(1, 1), 4.0, arrivals=ArrivalCounts(NOW_MS, 10_000.0, (45.0,) * 90))
    ahead = asked(pair(1, 1), 4.0, arrivals=ArrivalCounts(NOW_MS, 10_000.0, tuple(4.0 * each for each in ramp)))
    assert ahead.prediction.rps_ahead > level.prediction.rps_ahead
    assert ahead.size_of(WorkerRole.PREFILL) > level.size_of(WorkerRole.PREFILL)


def test_what_is_queued_now_is_cleared_within_half_a_window_of_the_new_workers() -> None:
    """180 s of prompts, hardly anything arriving, one ready, a start of 60 s: 120 s are left, which one does in 150 s;
    of twice as much 300 s are, which two do."""
    prefill, decode = pair(1, 1)
    tokens = int(180_000.0 / (prefill.step.prefill_ms(new_tokens=2048, chunk_tokens=2048) / 2048))
    decision = asked((msgspec.structs.replace(prefill, queued_tokens=tokens), decode), 0.0)
    assert decision.sizes[0].needed_queue == 1
    more = asked((msgspec.structs.replace(prefill, queued_tokens=2 * tokens), decode), 0.0)
    assert more.reason is ScalingReason.QUEUE
    assert sizes(more) == (2, 1)
    assert f"{2 * tokens} tokens queued" in more.sentence


def test_while_prompts_queue_answers_are_to_begin_as_fast_as_prompts_are_computed() -> None:
    prefill, decode = pair(6, 1, ceiling=20)
    busy = asked((msgspec.structs.replace(prefill, queued_tokens=20_000_000), decode), LIGHT)
    assert busy.size_of(WorkerRole.DECODE) > asked((prefill, decode), LIGHT).size_of(WorkerRole.DECODE)
    assert busy.sizes[1].needed_queue > 1


def test_a_batch_that_is_too_large_now_gets_more_workers() -> None:
    prefill, decode = pair(1, 2, max_sequences=256)
    busy = msgspec.structs.replace(decode, running=800, kv_tokens=800_000)
    decision = asked((prefill, busy))
    assert decision.reason is ScalingReason.QUEUE
    assert decision.size_of(WorkerRole.DECODE) > 2


def test_a_pool_shrinks_to_what_was_enough_for_a_start_and_a_drain() -> None:
    calm = asked(pair(4, 4), memory=remembered(1))
    assert calm.action is ScalingAction.REMOVE
    assert calm.reason is ScalingReason.SPARE
    assert sizes(calm) == (1, 1)


def test_survivors_keep_the_promise_with_less_late_than_may_be() -> None:
    for rps in (2.0, 7.0):
        pools = pair(9, 9, ceiling=9)
        decision = asked(pools, rps, memory=remembered(1))
        assert decision.action is ScalingAction.REMOVE
        window = window_of(requests(rps), NOW_MS, PROMISE, *pools)
        for view, size in zip(pools, decision.sizes, strict=True):
            load = Replay(window, view, PROMISE)
            assert load.keeps(size.size, SURELY)


def test_what_grew_lately_keeps_one_more_than_it_needs_at_that_load() -> None:
    lately = NOW_MS - 200_000.0
    grew = {"added_ms": lately, "added_rps": LIGHT}
    assert sizes(asked(pair(6, 6), memory=remembered(6, until_ms=lately, **grew))) == (2, 2)
    one_more = asked(pair(2, 2), memory=remembered(2, until_ms=lately, **grew))
    assert one_more.reason is ScalingReason.COOLING_DOWN
    assert sizes(one_more) == (2, 2)
    # The load that it grew for is over.
    other_load = remembered(6, until_ms=lately, added_ms=lately, added_rps=HEAVY)
    assert sizes(asked(pair(6, 6), memory=other_load)) == (1, 1)
    just_now = asked(pair(6, 6), memory=remembered(6, until_ms=NOW_MS - 10_000.0))
    assert sizes(just_now) == (6, 6)


def test_who_has_just_begun_to_look_takes_nothing_away() -> None:
    assert sizes(asked(pair(4, 4))) == (4, 4)


def test_a_size_that_turned_out_too_small_is_tried_again_later_each_time() -> None:
    heavy = asked(pair(1, 1, ceiling=20), HEAVY, memory=remembered(1, removed_ms=NOW_MS - 60_000.0, removed_rps=HEAVY))
    assert heavy.memory.of(WorkerRole.PREFILL).relapses == 1
    assert heavy.memory.of(WorkerRole.PREFILL).added_rps >= HEAVY
    wait = asked(pair(2, 2), memory=remembered(2, until_ms=0.0, added_ms=NOW_MS - 1.5 * CALM_MS, relapses=1))
    assert wait.reason is ScalingReason.COOLING_DOWN
    done = asked(pair(2, 2), memory=remembered(2, until_ms=0.0, added_ms=NOW_MS - 2.5 * CALM_MS, relapses=1))
    assert done.action is ScalingAction.REMOVE


def test_too_many_served_late_ask_for_one_more_whatever_replays_say() -> None:
    slow = requests(LIGHT, served_ms=60_000.0)
    decision = asked(pair(1, 1), samples=slow)
    assert decision.reason is ScalingReason.SERVED_LATE
    assert sizes(decision) == (2, 1)
    assert decision.prediction.observed_attainment == 0.0
    # What came before the last one was ready says nothing of it.
    since = asked(pair(2, 1), samples=slow, memory=remembered(2, added_ms=NOW_MS - 30_000.0))
    assert sizes(since) == (2, 1)


def test_no_requests_are_data_to_the_floor_and_to_sleep_where_that_is_zero() -> None:
    quiet = msgspec.structs.replace(remembered(3), active_ms=NOW_MS - 700_000.0)
    floors = asked(pair(3, 3), 0.0, memory=quiet)
    assert sizes(floors) == (1, 1)
    assert floors.reason is ScalingReason.IDLE
    asleep = asked(pair(3, 3, floor=0), 0.0, memory=quiet)
    assert sizes(asleep) == (0, 0)
    assert asleep.action is ScalingAction.TO_ZERO
    # Not before the pause is ten times what the next one has to wait for.
    lately = msgspec.structs.replace(remembered(1), active_ms=NOW_MS - 500_000.0)
    assert sizes(asked(pair(1, 1, floor=0), 0.0, memory=lately)) == (1, 1)


def test_pools_that_sleep_stay_asleep_until_a_request_comes() -> None:
    quiet = msgspec.structs.replace(remembered(0), active_ms=NOW_MS - 900_000.0)
    assert sizes(asked(pair(0, 0, floor=0), 0.0, memory=quiet)) == (0, 0)
    prefill, decode = pair(0, 0, floor=0)
    woken = asked((msgspec.structs.replace(prefill, queued_requests=1, queued_tokens=100), decode), 0.0, memory=quiet)
    assert woken.action is ScalingAction.WAKE
    assert woken.reason is ScalingReason.REQUESTS_WAIT
    assert sizes(woken) == (1, 1)


def test_what_someone_else_set_is_left_alone_for_a_while() -> None:
    edited = pair(7, 7, edits=1)
    first = asked(edited, memory=remembered(1))
    assert sizes(first) == (7, 7)
    assert first.reason is ScalingReason.HAND_EDIT
    small = asked(pair(1, 1, edits=1, ceiling=20), HEAVY, memory=remembered(1))
    assert sizes(small) == (1, 1)
    seen_long_ago = tuple(
        PoolMemory(role, 0.0, (Wanted(NOW_MS, 1),), edits=1, edited_ms=NOW_MS - CALM_MS) for role in WorkerRole
    )
    later = msgspec.structs.replace(remembered(1), pools=seen_long_ago)
    assert sizes(asked(edited, memory=later)) == (1, 1)


def test_a_worker_changes_its_role_before_a_new_one_is_started() -> None:
    prefill, decode = pair(1, 6, ceiling=20, shape="a")
    memory = msgspec.structs.replace(
        remembered(1),
        pools=(
            PoolMemory(WorkerRole.PREFILL, 0.0, (Wanted(NOW_MS, 1),), edits=0),
            PoolMemory(WorkerRole.DECODE, 0.0, (Wanted(NOW_MS - 100_000.0, 3),), edits=0),
        ),
    )
    decision = asked((prefill, decode), HEAVY, may_switch=True, memory=memory)
    assert decision.action is ScalingAction.SWITCH_ROLE
    assert decision.switch is not None
    assert decision.switch.from_role is WorkerRole.DECODE
    assert decision.size_of(WorkerRole.DECODE) <= 6 - decision.switch.count
    assert decision.size_of(WorkerRole.DECODE) >= decision.sizes[1].needed
    for not_equal in ({"may_switch": False}, {"pools": pair(1, 6, ceiling=20)}):
        given: dict[str, Any] = {"pools": (prefill, decode), "may_switch": True, **not_equal}
        assert asked(given.pop("pools"), HEAVY, memory=memory, **given).switch is None


def test_workers_that_would_end_anyway_change_their_role_instead() -> None:
    """Also soon after their pool has grown: the load is of another kind now, and a budget is all used."""
    prefill, decode = pair(1, 12, ceiling=20, shape="a")
    memory = msgspec.structs.replace(
        remembered(1),
        pools=(
            PoolMemory(WorkerRole.PREFILL, 0.0, (Wanted(NOW_MS, 1),), edits=0),
            PoolMemory(WorkerRole.DECODE, 0.0, (Wanted(NOW_MS - 100_000.0, 3),), edits=0, added_ms=NOW_MS - 120_000.0),
        ),
    )
    given: dict[str, Any] = {"memory": memory, "budget_devices": 13}
    ends = asked((prefill, decode), HEAVY, **given).size_of(WorkerRole.DECODE)
    assert ends < 12
    decision = asked((prefill, decode), HEAVY, may_switch=True, **given)
    assert decision.action is ScalingAction.SWITCH_ROLE
    assert decision.switch is not None
    assert decision.switch.count == min(12 - ends, decision.size_of(WorkerRole.PREFILL) - 1)


def test_a_budget_goes_where_it_helps_most() -> None:
    free = asked(pair(1, 1, ceiling=20), HEAVY)
    needed = sum(sizes(free))
    tight = asked(pair(1, 1, ceiling=20), HEAVY, budget_devices=needed - 1)
    assert tight.reason is ScalingReason.LIMITED
    assert sum(sizes(tight)) == needed - 1
    assert tight.size_of(WorkerRole.PREFILL) >= 3


def test_devices_that_still_drain_are_not_free() -> None:
    prefill, decode = pair(1, 1, ceiling=20)
    draining = (prefill, msgspec.structs.replace(decode, draining=2))
    assert sum(sizes(asked(draining, HEAVY, budget_devices=5))) == 3


def test_one_pool_of_both_is_scaled_by_both_latencies() -> None:
    decision = asked((pool(WorkerRole.BOTH, 1, ceiling=30, chunk_tokens=512),), 8.0)
    assert decision.action is ScalingAction.ADD
    assert decision.prediction.attainment_ttft is not None
    assert decision.prediction.attainment_ttft >= 0.95
    assert decision.prediction.attainment_tpot is not None
    assert decision.prediction.attainment_tpot >= 0.95


def test_without_a_promise_sizes_stay_and_bounds_still_hold() -> None:
    nothing = decide(ScalingInputs(NOW_MS, Promise(), pair(3, 12), requests(HEAVY)))
    assert sizes(nothing) == (3, 8)
    still = decide(ScalingInputs(NOW_MS, Promise(), pair(3, 3), requests(HEAVY)))
    assert still.reason is ScalingReason.NO_PROMISE


def test_without_pools_there_is_nothing_to_say() -> None:
    assert decide(ScalingInputs(NOW_MS, PROMISE, ())).sizes == ()


def test_a_pool_that_may_have_no_worker_is_not_woken() -> None:
    closed = msgspec.structs.replace(pool(WorkerRole.BOTH, 0), floor=0, ceiling=0, queued_requests=1)
    assert sizes(asked((closed,))) == (0,)


def test_counts_by_no_time_at_all_are_no_counts() -> None:
    decision = asked(pair(2, 2), arrivals=ArrivalCounts(NOW_MS, 2e-313, (1.0,) * 90))
    assert decision.inputs.arrivals == ArrivalCounts()


def test_what_a_neighbours_queue_made_late_asks_for_nothing() -> None:
    """Answers were late while the prompts that had queued were computed by the workers that came for them."""
    late = [msgspec.structs.replace(one, ttft_ms=100.0, tpot_ms=500.0) for one in requests(LIGHT)]
    assert sizes(asked(pair(1, 1), samples=tuple(late))) == (1, 2)
    lately = PoolMemory(WorkerRole.PREFILL, since_ms=0.0, added_ms=NOW_MS - 30_000.0, edits=0)
    decode = PoolMemory(WorkerRole.DECODE, since_ms=0.0, edits=0)
    memory = ScalingMemory((lately, decode), active_ms=NOW_MS)
    assert sizes(asked(pair(1, 1), samples=tuple(late), memory=memory)) == (1, 1)


def test_after_a_burst_that_went_there_is_room_for_one_more() -> None:
    calm = asked(pair(1, 1), 2.0)
    arrivals = ArrivalCounts(NOW_MS, 10_000.0, (*[20.0] * 120, *[300.0] * 6, *[20.0] * 90))
    after = asked(pair(1, 1), 2.0, arrivals=arrivals)
    assert [pool.needed for pool in after.sizes] == [pool.needed + 1 for pool in calm.sizes]
