"""The replay at other sizes: percentiles of a line of prompts and of batches of answers."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import pytest
from antiphon_policy.latency import StepModel
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import PoolView, Promise, RequestSample, TpotTarget, TtftTarget, is_feasible
from antiphon_policy.scaling.outlook import Outlook
from antiphon_policy.scaling.replay import Replay, fewest
from antiphon_policy.scaling.work import HOP_MS, Window, retimed, window_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policy.scaling.loop import PROMISE, poisson, pool

PLAIN = StepModel(0.0, 1.0, 0.0, 0.0, 0.0)
"""A millisecond a token, and nothing else."""


def plain(role: WorkerRole, **more: object) -> PoolView:
    return pool(role, 1, step=PLAIN, **more)


def window(samples: list[RequestSample], promise: Promise, pool: PoolView) -> Window:
    return window_of(samples, 1000.0 * promise.window_s, promise, pool, pool)


def test_prompts_wait_for_the_first_free_worker() -> None:
    """Ten prompts of 100 ms at once, limit 350 ms: one worker is in time with three, two with six, four with all."""
    promise = Promise(TtftTarget(350.0 + HOP_MS))
    view = plain(WorkerRole.PREFILL)
    load = Replay(window([RequestSample(0.0, 100, 100, 10)] * 10, promise, view), view, promise)
    assert [round(10 * load.late_share(workers)[0]) for workers in (1, 2, 3, 4)] == [7, 4, 1, 0]
    assert load.fewest(1, 8) == 4


def test_whoever_is_due_first_goes_first_and_a_long_prompt_that_may_wait_does() -> None:
    promise = Promise(TtftTarget(150.0, 1500.0))
    view = plain(WorkerRole.PREFILL)
    samples = [RequestSample(0.0, 100, 100, 1), RequestSample(1.0, 400, 400, 1), RequestSample(2.0, 100, 100, 1)]
    load = Replay(window(samples, promise, view), view, promise)
    assert load.late_share(1) == (0.0, 0.0)


def test_it_is_the_percentile_that_counts_and_not_the_mean() -> None:
    view = plain(WorkerRole.PREFILL)
    samples = [RequestSample(1000.0 * at, 10, 10, 1) for at in range(200)]
    burst = [RequestSample(250_000.0, 100, 100, 1)] * 12
    for percentile, needed in ((0.9, 1), (0.95, 2), (0.999, 12)):
        promise = Promise(TtftTarget(130.0, 0.0, percentile))
        assert Replay(window(samples + burst, promise, view), view, promise).fewest(1, 50) == needed


def test_answers_share_steps_and_more_workers_make_them_shorter() -> None:
    """20 answers at once on a step of 1 ms for each: 20 ms with one worker, 1 + 19 / n with n."""
    promise = Promise(None, TpotTarget(5.0))
    view = plain(WorkerRole.DECODE)
    load = Replay(window([RequestSample(150_000.0, 1, 1, 101)] * 20, promise, view), view, promise)
    assert load.fewest(1, 50) == 5
    assert load.keeps(5)
    assert not load.keeps(4)


def test_room_for_kv_bounds_how_many_decode_at_once() -> None:
    promise = Promise(None, TpotTarget(100.0))
    view = plain(WorkerRole.DECODE, kv_capacity_tokens=3100)
    load = Replay(window([RequestSample(150_000.0, 1, 900, 101)] * 12, promise, view), view, promise)
    # Three fit in a worker; the next three would wait for them: 300 ms + 300 ms for 100 tokens of 100 ms are allowed.
    assert load.keeps(1)
    tight = msgspec.structs.replace(promise, tpot=TpotTarget(4.0))
    assert Replay(window([RequestSample(150_000.0, 1, 900, 101)] * 12, tight, view), view, tight).fewest(1, 20) == 4


def test_on_a_pool_of_both_chunks_make_tokens_late() -> None:
    promise = Promise(TtftTarget(10_000.0), TpotTarget(30.0))
    both, decode = plain(WorkerRole.BOTH, chunk_tokens=100), plain(WorkerRole.DECODE)
    samples = [RequestSample(1000.0 * at, 985, 985, 50) for at in range(300)]
    assert Replay(window(samples, promise, decode), decode, promise).fewest(1, 9) == 1
    assert Replay(window(samples, promise, both), both, promise).fewest(1, 9) > 1


def test_what_no_worker_could_serve_in_time_is_counted_apart_and_asks_for_no_more() -> None:
    promise = Promise(TtftTarget(100.0), TpotTarget(5.0))
    view = plain(WorkerRole.PREFILL)
    hopeless = RequestSample(0.0, 2000, 2000, 10)
    assert not is_feasible(hopeless, promise, view, view)
    assert is_feasible(msgspec.structs.replace(hopeless, least_uncached_tokens=50), promise, view, view)
    slow = msgspec.structs.replace(view, step=StepModel(6.0, 0.01, 0.0, 0.0, 0.0))
    assert not is_feasible(RequestSample(0.0, 10, 10, 10), promise, slow, slow)
    found = window([hopeless, RequestSample(5000.0, 10, 10, 1)], promise, view)
    assert found.infeasible_share == 0.5
    assert Replay(found, view, promise).fewest(1, 9) == 1


def test_a_sample_that_stands_for_many_counts_for_many() -> None:
    """Ten times the requests need no more than ten times the workers, and no fewer than they keep busy."""
    samples = poisson(lambda _: 6.0, 300.0, seed=3)
    heavy = [msgspec.structs.replace(sample, weight=10.0) for sample in samples]
    for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
        view = pool(role)
        light = Replay(window(samples, PROMISE, view), view, PROMISE).fewest(2, 100)
        many = Replay(window(heavy, PROMISE, view), view, PROMISE).fewest(2, 200)
        assert 10 * (light - 1) < many + 1 <= 10 * light + 1
    busy_ms = 10.0 * sum(one.service_ms for one in window(samples, PROMISE, pool(WorkerRole.PREFILL)).work)
    view = pool(WorkerRole.PREFILL)
    assert Replay(window(heavy, PROMISE, view), view, PROMISE).fewest(2, 200) >= busy_ms / 300_000.0


def test_samples_that_stand_for_several_need_what_all_of_them_would() -> None:
    """Every third request, counted three times: the same workers, one more or less."""
    whole = poisson(lambda _: 18.0, 300.0, seed=5)
    thinned = [msgspec.structs.replace(sample, weight=3.0) for sample in whole[::3]]
    tight = Promise(TtftTarget(500.0, 100.0, 0.99), TpotTarget(40.0, 0.99))
    for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
        view = pool(role)
        all_of_them = Replay(window(whole, tight, view), view, tight).fewest(2, 100)
        some = Replay(window(thinned, tight, view), view, tight).fewest(2, 100)
        assert abs(some - all_of_them) <= 1


def test_a_window_in_which_the_load_grew_is_replayed_as_one_of_its_end() -> None:
    view = pool(WorkerRole.PREFILL)
    grew = window(poisson(lambda second: 1.0 if second < 200 else 8.0, 300.0), PROMISE, view)
    steady = retimed(grew, 8.0)
    assert steady.rps == pytest.approx(8.0, rel=0.05)
    halves = [sum(one.at_ms < steady.length_ms / 2 for one in steady.work), len(steady.work) / 2]
    assert halves[0] == pytest.approx(halves[1], rel=0.15)
    assert retimed(Window((), 1000.0), 5.0).work == ()


def test_a_load_that_steps_or_begins_inside_the_window_leaves_no_burst_where_it_did() -> None:
    """Parts that are stretched to one rate do not span the step; nor the time before the first request."""
    view = pool(WorkerRole.PREFILL)
    for rate in (lambda second: 2.0 if second < 137 else 16.0, lambda second: 0.01 if second < 283 else 16.0):
        steady = retimed(window(poisson(rate, 300.0, seed=7), PROMISE, view), 8.0)
        twelfths = [0] * 12
        for one in steady.work:
            twelfths[min(11, int(12.0 * one.at_ms / steady.length_ms))] += 1
        assert max(twelfths) < 2.0 * len(steady.work) / 12.0


def test_late_ones_are_counted_over_all_that_may_come_and_not_at_the_worst_of_it() -> None:
    view, promise = pool(WorkerRole.PREFILL), Promise(TtftTarget(500.0, 100.0, 0.95))
    usual = window(poisson(lambda _: 4.0, 300.0), promise, view)

    def at(rps: float) -> Replay:
        return Replay(retimed(usual, rps), view, promise)

    rare = Outlook([(0.02 * 40.0, lambda: at(40.0)), (0.98 * 4.0, lambda: at(4.0))])
    often = Outlook([(0.5 * 40.0, lambda: at(40.0)), (0.5 * 4.0, lambda: at(4.0))])
    usually, always = at(4.0).fewest(1, 60), at(40.0).fewest(1, 60)
    assert usually <= rare.fewest(1, 60) < often.fewest(1, 60) <= always


loads = st.lists(st.tuples(st.floats(0.0, 60_000.0), st.integers(1, 400), st.integers(1, 60)), min_size=1, max_size=40)


@settings(max_examples=60)
@given(loads, st.sampled_from(list(WorkerRole)), st.floats(1.25, 4.0))
def test_the_same_requests_in_less_time_never_need_fewer(
    load: list[tuple[float, int, int]], role: WorkerRole, faster: float
) -> None:
    promise = Promise(TtftTarget(500.0), TpotTarget(4.0), 60.0)
    view = plain(role)
    slow = window([RequestSample(at_ms, new, new, out) for at_ms, new, out in load], promise, view)
    work = tuple(msgspec.structs.replace(one, at_ms=one.at_ms / faster) for one in slow.work)
    fast = dataclasses.replace(slow, work=work, length_ms=slow.length_ms / faster)
    assert Replay(fast, view, promise).fewest(1, 60) >= Replay(slow, view, promise).fewest(1, 60)


@given(st.integers(0, 40), st.integers(0, 50), st.integers(1, 40))
def test_the_border_is_found_from_any_guess(border: int, guess: int, most: int) -> None:
    assert fewest(lambda size: size >= border, guess, most) == min(border, most + 1)


def test_a_quiet_time_in_fast_motion_is_no_busy_one() -> None:
    """Three requests in a second now and then, and a steady tenth: at the rate of that, no three come in a moment."""
    view = pool(WorkerRole.PREFILL)
    few = [RequestSample(30_000.0 * part + 300.0 * at, 1000, 1000, 10) for part in range(7) for at in range(3)]
    busy = [RequestSample(210_000.0 + 500.0 * at, 1000, 1000, 10) for at in range(180)]
    steady = retimed(window([*few, *busy], PROMISE, view), 2.0)
    gaps = [later.at_ms - earlier.at_ms for earlier, later in itertools.pairwise(steady.work)]
    assert min(gaps) > 250.0
    assert steady.rps == pytest.approx(2.0, rel=0.05)
