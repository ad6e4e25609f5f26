"""The elastic cluster: workers start late, drain without cutting anybody, switch roles, fail, and are paid for."""

from __future__ import annotations

import pytest
from antiphon_policy.routing import WorkerRole
from antiphon_policy.scaling import RoleSwitch
from antiphon_simulate.autoscale.cluster import StarvedError, run
from antiphon_simulate.autoscale.figures import figures, gpu_hours
from antiphon_simulate.autoscale.policies.static import Scheduled, Static
from antiphon_simulate.autoscale.records import Seen, Sizes, Wish
from antiphon_simulate.worker import HOP_MS

from tests.support.scaling import GOAL, SETTING, Told, at_times, load, setting

STEADY = [0.2 * at for at in range(600)]
"""Five requests a second for two minutes: 0.28 of a prefill worker, and ten answers at once."""


def test_an_idle_cluster_serves_a_request_as_the_step_model_says() -> None:
    result = run(load([1.0], 500, 11), SETTING, Static("one", Sizes(1, 1)), Sizes(1, 1))
    (served,) = result.servings
    # One chunk: 5 + 0.5 + 500 x 0.1 + 500 x 0.0001.
    assert served.ttft_ms == pytest.approx(55.55 + HOP_MS)
    # 500 tokens' KV moves in 0.2 + 0.98 ms; then ten steps of 5 + 0.1 + 0.5 and contexts of 501 to 510.
    moved_ms = 0.2 + 10_000_000 * 500 / 512 / 10e6
    steps_ms = 10 * 5.6 + 0.0001 * sum(range(501, 511))
    assert served.tpot_ms == pytest.approx((moved_ms + steps_ms) / 10)


def test_a_worker_serves_only_after_its_start_and_is_paid_for_from_its_order_on() -> None:
    scaler = at_times([(0.0, Sizes(1, 1)), (10.0, Sizes(2, 1))])
    result = run(load(STEADY), SETTING, scaler, Sizes(1, 1))
    ordered = next(moment.at_ms for moment in result.moments if moment.alive.prefill == 2)
    ready = next(moment.at_ms for moment in result.moments if moment.ready.prefill == 2)
    assert ordered == 10_000.0
    assert 16_000.0 <= ready - ordered <= 24_000.0
    starting = next(seen for seen in scaler.seen if seen.prefill.starting_ms)
    assert starting.prefill.starting_ms == (19_000.0,)  # as measured, a second after the order
    assert gpu_hours(result) == pytest.approx((2 * result.span_ms + result.span_ms - ordered) / 3_600_000.0)


def test_scaling_down_cuts_no_stream_and_moves_those_that_take_too_long() -> None:
    # Answers of about 20 s, six times as long as a drain may take.
    scaler = at_times([(0.0, Sizes(1, 3)), (30.0, Sizes(1, 1))])
    many = load(STEADY[:300], output_tokens=2000)
    result = run(many, SETTING, scaler, Sizes(1, 3))
    assert result.moved_streams > 0
    assert all(served.ended_ms is not None for served in result.servings)
    moved = [served for served in result.servings if served.moves]
    # Nothing of a moved answer was computed anew: what it had and what was left are what it was to be.
    assert all(served.output_tokens < served.call.output_tokens for served in moved)
    assert all(
        served.prompt_tokens + served.output_tokens == served.call.prompt_tokens + served.call.output_tokens
        for served in moved
    )
    gone = next(moment.at_ms for moment in result.moments if moment.alive.decode == 1)
    assert gone <= 30_000.0 + SETTING.site.drain_ms


def test_a_worker_that_drains_is_taken_back_before_another_is_started() -> None:
    scaler = at_times([(0.0, Sizes(1, 2)), (30.0, Sizes(1, 1)), (31.0, Sizes(1, 2))])
    result = run(load(STEADY[:300], output_tokens=1000), SETTING, scaler, Sizes(1, 2))
    assert result.starts == 0


def test_a_role_switch_is_sooner_than_a_start_and_costs_no_worker() -> None:
    def wish(seen: Seen) -> Wish:
        if seen.now_ms == 20_000.0:
            return Wish(Sizes(2, 1), RoleSwitch(WorkerRole.DECODE, WorkerRole.PREFILL, 1))
        return Wish(Sizes(1, 2) if seen.now_ms < 20_000.0 else Sizes(2, 1))

    result = run(load(STEADY), SETTING, Told(wish), Sizes(1, 2))
    assert (result.switches, result.starts) == (1, 0)
    ready = next(moment.at_ms for moment in result.moments if moment.ready.prefill == 2)
    assert ready - 20_000.0 == pytest.approx(SETTING.site.switch_ms, abs=1_000.0)
    assert {moment.alive.total for moment in result.moments} == {3}
    assert all(served.ended_ms is not None for served in result.servings)


def test_failed_workers_are_replaced_and_their_streams_end_elsewhere() -> None:
    failing = setting(mean_life_h=60.0 / 3600.0)
    result = run(load(STEADY, output_tokens=500), failing, Static("two", Sizes(2, 2)), Sizes(2, 2), seed=3)
    assert result.failures > 2
    assert result.starts >= result.failures - 1
    assert all(served.ended_ms is not None for served in result.servings)
    assert any(served.moves for served in result.servings)


def test_sizes_stay_within_bounds_and_budget_whatever_is_asked_for() -> None:
    greedy = Static("greedy", Sizes(50, 50))
    result = run(load(STEADY), setting(budget=5), greedy, Sizes(1, 1))
    assert max(moment.wanted.total for moment in result.moments) == 5
    bounded = run(load(STEADY), setting(most=Sizes(2, 3)), greedy, Sizes(1, 1))
    assert bounded.moments[-1].wanted == Sizes(2, 3)
    least = run(load(STEADY), SETTING, Static("none", Sizes(0, 0)), Sizes(2, 2))
    assert least.moments[-1].wanted == Sizes(1, 1)


def test_pools_that_sleep_hold_requests_until_somebody_wakes_them() -> None:
    asleep = setting(least=Sizes(0, 0), start_spread=0.0)

    def wish(seen: Seen) -> Wish:
        return Wish(Sizes(1, 1) if seen.prefill.queued_requests or seen.prefill.wanted else Sizes(0, 0))

    (served,) = run(load([5.5]), asleep, Told(wish), Sizes(0, 0)).servings
    assert served.ttft_ms == pytest.approx(20_000.0 + 500.0 + 55.55 + HOP_MS)
    with pytest.raises(StarvedError, match="left 1 requests without workers"):
        run(load([5.5]), asleep, Static("none", Sizes(0, 0)), Sizes(0, 0))


def test_a_schedule_has_its_workers_ready_when_it_wants_them() -> None:
    schedule = [Sizes(1, 1)] * 6 + [Sizes(3, 2)] * 6
    scaler = Scheduled("known", schedule, slot_ms=10_000.0, lead_ms=SETTING.site.longest_start_ms)
    result = run(load(STEADY), SETTING, scaler, Sizes(1, 1))
    assert max(moment.at_ms for moment in result.moments if moment.ready != Sizes(3, 2)) <= 60_000.0
    first = next(moment.at_ms for moment in result.moments if moment.alive != Sizes(1, 1))
    assert first == 36_000.0  # 24 s before 60 s


def test_the_same_arguments_give_the_same_run() -> None:
    runs = [run(load(STEADY), SETTING, at_times([(0.0, Sizes(2, 2)), (50.0, Sizes(3, 1))]), Sizes(2, 2)) for _ in "ab"]
    assert runs[0].moments == runs[1].moments
    assert [one.ended_ms for one in runs[0].servings] == [one.ended_ms for one in runs[1].servings]


def test_a_reversal_is_a_change_of_direction_within_ten_minutes() -> None:
    swing = at_times([(0.0, Sizes(1, 1)), (10.0, Sizes(2, 1)), (20.0, Sizes(1, 1)), (30.0, Sizes(2, 1))])
    found = figures(run(load(STEADY), SETTING, swing, Sizes(1, 1)), GOAL)
    assert found.most_reversals_in_10_min == 2
    grown = at_times([(0.0, Sizes(1, 1)), (10.0, Sizes(2, 1)), (20.0, Sizes(3, 1))])
    assert figures(run(load(STEADY), SETTING, grown, Sizes(1, 1)), GOAL).most_reversals_in_10_min == 0


def test_time_outside_is_counted_until_three_buckets_are_inside_again() -> None:
    # A burst of 40 prompts at 30 s takes one worker 40 x 55 ms: those that come then are late, and nobody after.
    burst = load(sorted([*STEADY, *([30.0] * 40)]))
    found = figures(run(burst, SETTING, Static("one", Sizes(1, 2)), Sizes(1, 2)), GOAL)
    assert found.seconds_back_in_sla == 10.0
    assert found.seconds_outside_sla == 10.0
    assert found.attainment is not None
    assert 0.9 < found.attainment < 1.0


def test_those_that_are_too_late_wait_for_those_that_are_not() -> None:
    # One worker does 18 of these prompts a second, of 27 that come: most of those are in time, at all times.
    often = load([at / 27.0 for at in range(1350)], output_tokens=2)
    result = run(often, SETTING, Static("one", Sizes(1, 1)), Sizes(1, 1))
    by_second = [[served.is_inside(GOAL) for served in result.servings[at : at + 270]] for at in range(270, 1350, 270)]
    assert all(0.45 < sum(inside) / len(inside) < 0.75 for inside in by_second)
    # And those wait, but not for ever: they get one token in seventeen.
    waited = [served for served in result.servings if not served.is_inside(GOAL) and served.first_ms is not None]
    assert min(served.first_ms or 0.0 for served in waited) < often.span_ms / 2.0


def test_those_who_decide_are_told_start_and_drain_times_as_they_were_measured() -> None:
    scaler = at_times([(0.0, Sizes(1, 1)), (10.0, Sizes(1, 2)), (60.0, Sizes(1, 1))])
    run(load(STEADY), SETTING, scaler, Sizes(1, 1))
    before, after = scaler.seen[0].decode, scaler.seen[-1].decode
    assert (before.start_ms, before.drain_ms) == (SETTING.site.start_ms, SETTING.site.drain_ms)
    assert 16_000.0 <= after.start_ms <= 24_000.0
    assert after.start_ms != SETTING.site.start_ms
    assert 0.0 <= after.drain_ms < SETTING.site.drain_ms  # answers of half a second
