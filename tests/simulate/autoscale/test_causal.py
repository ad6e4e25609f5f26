"""What the best law without the future could keep: cases that can be counted by hand, and policies that were run."""

from __future__ import annotations

import random

import numpy as np
import pytest
from antiphon_simulate.autoscale.causal import best_causal, needs
from antiphon_simulate.autoscale.cluster import run
from antiphon_simulate.autoscale.figures import attainment, gpu_hours
from antiphon_simulate.autoscale.jumps import jump_workers
from antiphon_simulate.autoscale.losses import Grid, Losses, late_prompts
from antiphon_simulate.autoscale.oracle import OracleSearch
from antiphon_simulate.autoscale.policies.static import Static
from antiphon_simulate.autoscale.records import Seen, Sizes, Wish

from tests.support.scaling import GOAL, SETTING, Told, load, setting

GRID = Grid(slot_ms=10.0, span_ms=2000.0)
CAME = np.full(GRID.slots, 100.0)


def losses(needed: list[int]) -> Losses:
    """Of 100 requests in each slot 50 are late for each worker that it lacks."""
    sizes = np.arange(1, 5)
    return Losses(sizes, np.array([[50.0 * max(0, need - size) for need in needed] for size in sizes]))


def share(needed: list[int], workers: float) -> float:
    found = losses(needed)
    return best_causal([found], GRID, CAME, target=0.99, start_ms=10.0, allowed_ms=workers * GRID.span_ms)


def test_a_jump_that_nothing_announces_is_served_by_those_who_were_there_before() -> None:
    draws = random.Random(1)
    # One worker is needed, but three at times, once in ten, never twice in succession and without any order.
    needed: list[int] = []
    while len(needed) < GRID.slots:
        needed += [3, 1, 1, 1] if draws.random() < 0.13 else [1]
    needed = needed[: GRID.slots]
    jumps = needed.count(3) / len(needed)
    assert share(needed, 1.0) == pytest.approx(1.0 - jumps, abs=0.01)
    # A worker more at all times but right after a jump: half of what is lost then is in time.
    assert 1.0 - 0.5 * jumps <= share(needed, 2.0) <= 1.0 - 0.3 * jumps
    assert share(needed, 3.0) == 1.0
    # The oracle pays for a worker and two tenths.
    assert np.mean(needs(losses(needed), CAME, 0.99)) == pytest.approx(1.0 + 2.0 * jumps)


def test_what_is_announced_one_start_before_is_kept_at_its_own_cost() -> None:
    needed = ([1] * 8 + [2] * 8 + [3] * 8) * 9
    needed = needed[: GRID.slots]
    assert share(needed, np.mean(needed) + 0.2) > 0.97
    assert share(needed, np.mean(needed)) < 1.0


def test_no_policy_that_does_not_see_the_future_is_above_it_at_its_cost() -> None:
    # 5 prompts a second, and 80 for ten seconds three times.
    times = [0.2 * at for at in range(3000)]
    times += [at_s + at / 80.0 for at_s in (63.0, 141.0, 247.0) for at in range(800)]
    small, how = load(sorted(times), output_tokens=10), setting(start_spread=0.0)
    search = OracleSearch(small, how, runs=4)
    oracle = search.find()
    best = search.causal_attainment(oracle.gpu_hours)
    allowed = max(1.1 * oracle.gpu_hours, oracle.gpu_hours + small.span_ms / 3_600_000.0)

    def reacts(seen: Seen) -> Wish:
        return Wish(Sizes(3 if seen.prefill.queued_requests > 3 else 1, 1))

    tried = [(Told(reacts), Sizes(1, 1))]
    tried += [(Static("fixed", sizes), sizes) for sizes in (Sizes(1, 1), Sizes(2, 1), Sizes(3, 1))]  # type: ignore[list-item]
    cheap = 0
    for scaler, begin in tried:
        result = run(small, how, scaler, begin)
        if gpu_hours(result) <= allowed:
            cheap += 1
            assert attainment(result, GOAL) <= best
    assert cheap >= 2
    assert best < GOAL.target


def test_prompts_alone_are_as_late_as_in_the_whole_cluster() -> None:
    many = load([0.05 * at for at in range(900)], output_tokens=5)
    result = run(many, SETTING, Static("two", Sizes(1, 6)), Sizes(1, 6))
    late = {call.index for call in late_prompts(many.calls, SETTING, 1)}
    assert late
    assert late == {one.call.index for one in result.servings if (one.ttft_ms or 0.0) > one.call.ttft_limit_ms}


def test_a_load_jumps_where_a_workers_worth_comes_within_a_start() -> None:
    # 5 and 40 prompts a second: 0.28 and 2.2 workers, in a start of 20 s.
    steady = [0.2 * at for at in range(600)]
    assert jump_workers(load(steady, output_tokens=2), SETTING) == 0.0
    jump = sorted([*steady, *(60.0 + at / 35.0 for at in range(1400))])
    assert 1.0 < jump_workers(load(jump, output_tokens=2), SETTING) < 2.0
    # The same growth over four minutes is none.
    slow = [at_s for at_s in np.cumsum([1.0 / (5.0 + at / 140.0) for at in range(5000)]) if at_s < 240.0]
    assert jump_workers(load([float(at_s) for at_s in slow], output_tokens=2), SETTING) < 1.0
