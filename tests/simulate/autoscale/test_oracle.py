"""The oracle lies between a bound that nobody can go below and schedules that were run: shown by trying all of them."""

from __future__ import annotations

import itertools
import random

import pytest
from antiphon_simulate.autoscale.calls import Load
from antiphon_simulate.autoscale.cluster import run
from antiphon_simulate.autoscale.figures import attainment, gpu_hours
from antiphon_simulate.autoscale.oracle import OracleSearch
from antiphon_simulate.autoscale.oracle_bound import least_worker_ms
from antiphon_simulate.autoscale.policies.static import Scheduled, Static
from antiphon_simulate.autoscale.records import ScaleRun, Setting, Sizes
from antiphon_simulate.autoscale.work import Demand

from tests.support.scaling import GOAL, load, setting

AT_ONCE = setting(start_ms=0.0, switch_ms=0.0, drain_ms=0.0, most=Sizes(3, 3))
SLOT_MS = 10_000.0


def cheapest_by_trying(small: Load, how: Setting) -> float:
    """GPU-hours of the cheapest schedule on the grid that keeps the goal, of all that there are. Both pools are tried
    apart, the other one at its largest, then the cheapest sums until one of them keeps the goal."""
    slots = -int(-small.span_ms // SLOT_MS)
    tried = []
    for prefill in itertools.product(range(1, 4), repeat=slots):
        for decode in itertools.product(range(1, 3), repeat=slots):
            tried.append((sum(prefill) + sum(decode), prefill, decode))
    best = float("inf")
    for cost, prefill, decode in sorted(tried):
        if (cost - 2) * SLOT_MS / 3_600_000.0 >= best:  # the last slot may be cut short
            break
        schedule = [Sizes(*sizes) for sizes in zip(prefill, decode, strict=True)]
        result = run(small, how, Scheduled("tried", schedule, slot_ms=SLOT_MS, lead_ms=0.0), schedule[0])
        if attainment(result, GOAL) >= GOAL.target:
            best = min(best, gpu_hours(result))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_no_schedule_is_cheaper_than_the_bound_and_the_oracle_is_one_that_was_run(seed: int) -> None:
    draws = random.Random(seed)
    # Three slots with up to 30 prompts a second: 0 to 1.6 workers.
    rates = [draws.choice([1, 8, 20, 30]) for _ in range(3)]
    times = sorted(10.0 * at + 10.0 * draws.random() for at, rate in enumerate(rates) for _ in range(10 * rate))
    small = load(times, output_tokens=20)
    search = OracleSearch(small, AT_ONCE, runs=40)
    least, found = cheapest_by_trying(small, AT_ONCE), search.find()
    assert found.reaches
    assert search.bound_gpu_hours() <= least + 1e-9
    assert least <= found.gpu_hours + 1e-9
    assert found.gpu_hours <= 1.15 * least
    assert attainment(found.run, GOAL) >= GOAL.target


def bound(demands: list[Demand], **more: float) -> float:
    words = {"span_ms": 40.0, "slot_ms": 10.0, "target": 1.0, "start_ms": 0.0} | more
    return least_worker_ms(demands, least=1, most=4, **words)  # type: ignore[arg-type]


def test_the_bound_counts_whole_workers_slot_by_slot() -> None:
    # 15 ms of work that has to be done between 10 and 20: two workers there, one elsewhere.
    assert bound([Demand(10.0, 20.0, 15.0)]) == pytest.approx(50.0, rel=0.02)
    # With two slots' time for it, one worker is enough.
    assert bound([Demand(10.0, 30.0, 15.0)]) == pytest.approx(40.0, rel=0.02)
    # A worker that starts is paid for before it serves.
    assert bound([Demand(10.0, 20.0, 15.0)], start_ms=7.0) == pytest.approx(57.0, rel=0.02)
    # Nobody has to serve those that the target leaves out.
    many = [Demand(10.0, 20.0, 15.0), *(Demand(20.0, 30.0, 0.01) for _ in range(99))]
    assert bound(many, target=0.99) == pytest.approx(40.0, rel=0.02)


def test_the_bound_is_never_above_the_work_or_below_the_least_pool() -> None:
    draws = random.Random(5)
    demands = [Demand(at, at + draws.random() * 15.0, draws.random() * 4.0) for at in range(0, 40, 2)]
    assert 40.0 <= bound(demands) <= 160.0
    assert bound([]) == 40.0
    assert bound(demands) >= bound(demands, target=0.8)


def test_the_oracle_is_there_before_the_load_is_and_gone_after_it() -> None:
    # 5 prompts a second are 0.28 workers, 40 are 2.2: known beforehand, three are ready when they come.
    times = [0.2 * at for at in range(300)] + [60.0 + at / 40.0 for at in range(1600)]
    times += [100.0 + 0.2 * at for at in range(500)]
    search = OracleSearch(load(times, output_tokens=10), setting(), runs=20)
    found = search.find()
    assert found.reaches
    assert [found.schedule[at].prefill for at in (0, 8, 15)] == [1, 3, 1]
    assert found.gpu_hours < gpu_hours(fixed(times, search.peak()))


def fixed(times: list[float], sizes: Sizes) -> ScaleRun:
    return run(load(times, output_tokens=10), setting(), Static("fixed", sizes), sizes)


def test_a_goal_that_no_pools_keep_is_said_to_be_one() -> None:
    # 60 prompts at once: six workers take 0.5 s for them, and only the first tenths are inside.
    found = OracleSearch(load([1.0] * 200 + [30.0], prompt_tokens=2000), setting(most=Sizes(2, 2)), runs=4).find()
    assert not found.reaches
    assert found.schedule[0] == Sizes(2, 2)


def test_where_pools_may_sleep_the_oracle_lets_them() -> None:
    # Two bursts of requests, a hundred seconds apart.
    bursts = load([0.2 * at for at in range(50)] + [110.0 + 0.2 * at for at in range(50)], output_tokens=20)
    asleep = setting(least=Sizes(0, 0), most=Sizes(2, 2))
    search = OracleSearch(bursts, asleep, runs=12)
    found = search.find()
    assert found.reaches
    assert any(moment.alive.total == 0 for moment in found.run.moments)
    awake = OracleSearch(bursts, setting(most=Sizes(2, 2)), runs=12).find()
    assert found.gpu_hours < awake.gpu_hours
    assert search.bound_gpu_hours() <= found.gpu_hours
