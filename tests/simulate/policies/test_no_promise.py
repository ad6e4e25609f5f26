"""A cluster whose SLA is endless promises nothing: routing there is that of gateways without an SLA."""

from __future__ import annotations

import math
from typing import Any

import pytest
from antiphon_policy.latency import StepModel
from antiphon_simulate.cluster import simulate
from antiphon_simulate.policies.antiphon import AntiphonPolicy
from antiphon_simulate.records import ClusterShape, Ending, Sla, Timing, TraceRequest

REQUESTS = [TraceRequest(at, 40.0 * at, 700, 5, (1, 100 + at)) for at in range(12)]


class Watched(AntiphonPolicy):
    """Keeps what the table was asked, and with what it was told of the workload."""

    def begin(self, cluster: Any) -> None:
        super().begin(cluster)
        choose = self.table.choose
        self.promises: list[tuple[float | None, ...]] = []

        def noted(request: Any, *more: Any) -> Any:
            self.promises.append((request.ttft_limit_ms, request.tpot_limit_ms, self.table.workload.ttft_limit_ms))
            return choose(request, *more)

        self.table.choose = noted  # type: ignore[method-assign]


@pytest.mark.parametrize("shape", [ClusterShape(2, 2, 100), ClusterShape(2, 0, 100)], ids=["pairs", "both"])
def test_an_endless_limit_is_told_as_none(shape: ClusterShape) -> None:
    policy = Watched()
    sla = Sla(ttft_ms=math.inf, ttft_ms_per_1k_prompt_tokens=0.0, tpot_ms=math.inf)
    result = simulate(REQUESTS, shape, Timing(StepModel()), policy, sla, seed=1)
    assert all(outcome.ending is Ending.COMPLETE for outcome in result.outcomes)
    assert len(policy.promises) >= len(REQUESTS)
    assert set(policy.promises) == {(None, None, None)}


def test_any_other_limit_is_told_as_it_is() -> None:
    policy = Watched()
    simulate(REQUESTS, ClusterShape(2, 2, 100), Timing(StepModel()), policy, Sla(ttft_ms=5000.0), seed=1)
    assert all(None not in promise for promise in policy.promises)
