"""The worked numbers of docs/routing.md come from the code."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from antiphon_policy.latency import StepModel
from antiphon_policy.routing import RouteRequest, RoutingSnapshot, WorkerRole, WorkerView, Workload, route

PAGE = (Path(__file__).parents[2] / "docs" / "routing.md").read_text()
REQUEST = RouteRequest(prompt_tokens=1000, block_tokens=64, block_bytes=1_000_000, max_tokens=16)


def worker(worker_id: str, role: WorkerRole, **fields: int) -> WorkerView:
    view = WorkerView(worker_id, role, 0, 0, 0, 0, 1000, 1000, StepModel())
    return msgspec.structs.replace(view, **fields)  # type: ignore[arg-type]


def costs(workers: tuple[WorkerView, ...], request: RouteRequest, workload: Workload) -> list[float]:
    decision = route(RoutingSnapshot(workers, {}, workload), request, 0.0)
    assert decision.cost is not None
    return [decision.cost.total_ms, *(option.cost_ms for option in decision.alternatives)]


@pytest.mark.parametrize(("held", "said"), [(0, ("553.56", "1049.21")), (14, ("111.6", "148.9"))])
def test_idle_workers(held: int, said: tuple[str, str]) -> None:
    workers = (worker("d0", WorkerRole.DECODE, leading_blocks=held), worker("p0", WorkerRole.PREFILL))
    for cost, text in zip(costs(workers, REQUEST, Workload()), said, strict=True):
        assert cost == pytest.approx(float(text), abs=0.06)
        assert text in PAGE


def test_busy_workers_with_promises() -> None:
    workload = Workload(
        uncached_tokens=1000,
        output_tokens=200,
        short_output_tokens=40,
        waiting_tokens=2000,
        ttft_limit_ms=2000.0,
        evicted_reuse=0.2,
    )
    workers = (
        worker("d0", WorkerRole.DECODE, running=20, kv_tokens=20_000),
        worker("p0", WorkerRole.PREFILL, queued_tokens=600, leading_blocks=10),
        worker("p1", WorkerRole.PREFILL, queued_tokens=100),
    )
    request = msgspec.structs.replace(REQUEST, max_tokens=1000, ttft_limit_ms=2000.0, tpot_limit_ms=50.0)
    for cost, text in zip(costs(workers, request, workload), ("2106.2", "2284.2", "2398.5"), strict=True):
        assert cost == pytest.approx(float(text), abs=0.06)
        assert f"**{text}**" in PAGE
    decision = route(RoutingSnapshot(workers, {}, workload), request, 0.0)
    assert (decision.prefill, decision.prefix_peers) == ("p1", (("p0", 10),))
