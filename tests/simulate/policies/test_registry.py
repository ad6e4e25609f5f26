"""Every policy has a name under which the command finds it, and a mistake is told with what there is."""

from __future__ import annotations

import pytest
from antiphon_policy.latency import StepModel
from antiphon_simulate.cluster import simulate
from antiphon_simulate.policies import registry
from antiphon_simulate.records import ClusterShape, Ending, Sla, Timing, TraceRequest

REQUESTS = [TraceRequest(at, 20.0 * at, 700, 5, (1, 100 + at)) for at in range(40)]


@pytest.mark.parametrize("name", registry.NAMES)
@pytest.mark.parametrize("shape", [ClusterShape(2, 2, 100), ClusterShape(3, 0, 100)], ids=["pairs", "both"])
def test_each_serves_a_small_workload_at_its_default_and_over_its_sweep(name: str, shape: ClusterShape) -> None:
    for setting in (None, *registry.sweep(name)):
        policy = registry.make(name, setting)
        result = simulate(REQUESTS, shape, Timing(StepModel()), policy, Sla(), seed=3)
        assert len(result.outcomes) == len(REQUESTS)
        assert all(outcome.ending is Ending.COMPLETE for outcome in result.outcomes)


def test_antiphon_comes_first_and_the_bound_last() -> None:
    assert (registry.NAMES[0], registry.NAMES[-1]) == ("antiphon", "bound")


@pytest.mark.parametrize("name", registry.NAMES)
def test_each_tells_what_it_is_and_its_default_is_in_its_sweep(name: str) -> None:
    about, sweep = registry.describe(name), registry.sweep(name)
    assert ("setting" in about) is bool(sweep)
    if sweep:
        default = float(about.rpartition(", ")[2].removesuffix(" by default"))
        assert default in sweep


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    for ask in (registry.make, registry.sweep, registry.describe):
        with pytest.raises(registry.UnknownPolicyError, match=r"round_robin.*dynamo_cost.*bound"):
            ask("fastest")


def test_a_setting_for_a_policy_without_one_is_refused() -> None:
    with pytest.raises(registry.UnknownPolicyError, match="lmetric has no setting"):
        registry.make("lmetric", 2.0)
