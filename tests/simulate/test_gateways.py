"""Several gateways over one cluster: each knows its own requests at once, and of the others' what workers report."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from antiphon_simulate.cluster import Cluster, StalledError, simulate
from antiphon_simulate.policies.antiphon import AntiphonPolicy
from antiphon_simulate.policies.round_robin import RoundRobinPolicy
from antiphon_simulate.records import Arrival, ClusterShape, Ending, Placement, Sla

from tests.simulate.test_cluster import Nothing
from tests.support.simulated_cluster import BLOCK_TOKENS, TIMING, Placed, request


def cluster_of(gateways: int, policy: Placed, requests: list, shape: ClusterShape) -> Cluster:  # type: ignore[type-arg]
    return Cluster(requests, shape, TIMING, policy, Sla(), block_tokens=BLOCK_TOKENS, gateways=gateways)


def test_requests_are_split_and_each_ends_once() -> None:
    cluster = cluster_of(
        3,
        Placed(lambda arrival, policy: Placement("decode-0", "prefill-0")),
        [request(n, 3.0 * n, 60, 4) for n in range(60)],
        ClusterShape(1, 1, 400),
    )
    result = cluster.run()
    cluster.check_integrity()
    assert all(outcome.ending is Ending.COMPLETE for outcome in result.outcomes)
    ends = [[index for index, _ in gateway.policy.ends] for gateway in cluster.gateways]  # type: ignore[attr-defined]
    assert sorted(index for its in ends for index in its) == list(range(60))
    assert min(map(len, ends)) > 10


def test_a_gateway_sees_its_own_requests_at_once_and_those_of_others_when_workers_report() -> None:
    seen: list[tuple[int, int]] = []

    def choose(arrival: Arrival, policy: Placed) -> Placement:
        state = policy.cluster.workers[0]
        number = policy.cluster.number  # type: ignore[attr-defined]
        seen.append((number, state.queued_requests))
        return Placement("decode-0", "prefill-0")

    cluster = cluster_of(2, Placed(choose), [request(n, 0.0, 64, 2) for n in range(12)], ClusterShape(1, 1, 400))
    cluster.run()
    for number in range(2):
        its = [queued for gateway, queued in seen if gateway == number]
        assert len(its) > 2
        assert its == list(range(len(its)))
    # In the end everything has been reported to everybody.
    for gateway in cluster.gateways:
        assert [state.queued_requests for state in gateway.workers] == [0, 0]
        assert [state.running for state in gateway.workers] == [0, 0]
        assert [state.free_blocks for state in gateway.workers] == [400, 400]


def test_each_has_a_policy_of_its_own() -> None:
    requests = [request(n, 5.0 * n, 40, 3) for n in range(8)]
    result = simulate(
        requests, ClusterShape(2, 2, 100), TIMING, RoundRobinPolicy(), Sla(), seed=0, block_tokens=16, gateways=8
    )
    firsts = [outcome.placement.prefill for outcome in result.outcomes if outcome.placement]
    # Eight turns that each begin at the first worker, so hardly anybody gets the second.
    assert firsts.count("prefill-0") > 4


def test_a_gateway_that_keeps_requests_back_for_ever_is_told_so() -> None:
    with pytest.raises(StalledError, match="nothing keeps"):
        simulate(
            [request(n, 0.0, 10, 1) for n in range(4)],
            ClusterShape(1, 1, 100),
            TIMING,
            Nothing(),
            Sla(),
            seed=0,
            block_tokens=BLOCK_TOKENS,
            gateways=2,
        )


@pytest.mark.parametrize("gateways", [2, 4])
def test_what_waits_at_several_gateways_hardly_ever_fills_the_same_room_twice(gateways: int) -> None:
    """Left alone they do with every third or fourth: all hear of room with the same report."""
    requests = [request(n, 40.0 * n, 1024, 2) for n in range(40)]
    shape = ClusterShape(1, 2, 4000)
    result = simulate(
        requests, shape, TIMING, AntiphonPolicy(), Sla(), seed=0, block_tokens=BLOCK_TOKENS, gateways=gateways
    )
    placed_ms: defaultdict[str, list[float]] = defaultdict(list)
    for outcome in result.outcomes:
        assert outcome.placement is not None
        if outcome.placed_ms - outcome.arrived_ms > 100.0:
            placed_ms[outcome.placement.prefill or outcome.placement.decode].append(outcome.placed_ms)
    waited = sum(map(len, placed_ms.values()))
    assert waited > 30
    # A prompt takes 130 ms and more.
    twice = sum(later - one < 30.0 for its in placed_ms.values() for one, later in itertools.pairwise(sorted(its)))
    assert twice <= waited / 10
