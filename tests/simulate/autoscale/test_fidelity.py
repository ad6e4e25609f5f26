"""The request-level cluster against the step-level one (`cluster.simulate`), on the same requests.

The step-level one routes each prompt to a worker at once (`least_queued`), or keeps a line and lets decode workers
compute prompts too (`antiphon`). With one worker in each pool and limits that nobody misses, the first is the same
line; with more the request-level line is a little better, as one line is. Where there is too much, both lines let those
wait that are too late already. The stated error is what is asserted here.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from antiphon_simulate.autoscale.calls import make_load
from antiphon_simulate.autoscale.cluster import run
from antiphon_simulate.autoscale.goal import Goal
from antiphon_simulate.autoscale.loads import generated
from antiphon_simulate.autoscale.policies.static import Static
from antiphon_simulate.autoscale.records import Setting, Site, Sizes
from antiphon_simulate.cluster import simulate
from antiphon_simulate.figures import Percentiles
from antiphon_simulate.policies import registry
from antiphon_simulate.records import ClusterShape, Sla
from antiphon_simulate.timings import read_timing

TIMING = read_timing("example-gpu")
GOAL = Goal(1000.0, 40.0)
EASY = Goal(60_000.0, 40.0)
"""Nobody is late, so due first is first come, first served."""


def latencies(rps: float, sizes: Sizes, policy: str, goal: Goal = GOAL) -> tuple[tuple[Percentiles, Percentiles], ...]:
    """(TTFT, TPOT) of the request-level cluster, then of the step-level one."""
    requests = generated("constant", peak_rps=rps, seed=2, length_s=400.0 / rps)
    result = run(
        make_load("constant", requests, TIMING, goal),
        Setting(TIMING, goal, Site(kv_tokens=4096 * 512)),
        Static("as they are", sizes),
        sizes,
    )
    shape = ClusterShape(sizes.prefill, sizes.decode, 4096)
    outcomes = simulate(requests, shape, TIMING, registry.make(policy), Sla(goal.ttft_ms, 0.0, 40.0), seed=0).outcomes
    long = [one for one in result.servings if one.call.output_tokens > 1]
    return (
        (of([one.ttft_ms or 0.0 for one in result.servings]), of([one.tpot_ms or 0.0 for one in long])),
        (
            of([one.ttft_ms for one in outcomes]),
            of([one.tpot_ms for one in outcomes if one.request.output_tokens > 1]),
        ),
    )


def of(values: Sequence[float]) -> Percentiles:
    return Percentiles.of(values)


@pytest.mark.parametrize("rps", [4.0, 7.0])
def test_one_worker_in_each_pool_is_the_step_level_cluster_within_a_tenth(rps: float) -> None:
    (ttft, tpot), (true_ttft, true_tpot) = latencies(rps, Sizes(1, 1), "least_queued", EASY)
    for name in ("p50", "p90", "p95"):
        assert getattr(ttft, name) == pytest.approx(getattr(true_ttft, name), rel=0.10)
        assert getattr(tpot, name) == pytest.approx(getattr(true_tpot, name), rel=0.03)


def test_larger_pools_are_within_a_fifth_of_both_ways_to_route() -> None:
    for policy in ("least_queued", "antiphon"):
        (ttft, tpot), (true_ttft, true_tpot) = latencies(36.0, Sizes(5, 2), policy)
        for name in ("p50", "p90"):
            assert getattr(ttft, name) == pytest.approx(getattr(true_ttft, name), rel=0.35 if name == "p90" else 0.1)
            assert getattr(tpot, name) == pytest.approx(getattr(true_tpot, name), rel=0.05)


def test_with_too_much_to_do_as_many_are_in_time_as_by_the_gateways_order() -> None:
    requests = generated("constant", peak_rps=12.0, seed=2, length_s=30.0)
    result = run(
        make_load("too much", requests, TIMING, GOAL),
        Setting(TIMING, GOAL, Site(kv_tokens=4096 * 512)),
        Static("one", Sizes(1, 1)),
        Sizes(1, 1),
    )
    true = simulate(
        requests, ClusterShape(1, 1, 4096), TIMING, registry.make("antiphon"), Sla(1000.0, 0.0, 40.0), seed=0
    )
    inside = sum((one.ttft_ms or 0.0) <= 1000.0 for one in result.servings) / len(requests)
    # There, decode workers that are not busy compute prompts too.
    truly = sum(one.ttft_ms <= 1000.0 for one in true.outcomes) / len(requests)
    assert truly - 0.12 <= inside <= truly
