"""What it costs a request that it can be explained: time to keep its trail and to make its header, and memory.

    python benchmarks/gateway/explain_cost.py

Sizes of fleets are interleaved; the least and the median of the rounds are told, in microseconds of one request.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
import uuid
from types import SimpleNamespace
from typing import cast

from antiphon_gateway.explain import OutcomeState, RouteInputs, Trail
from antiphon_gateway.explain_store import ExplainStore
from antiphon_gateway.flight import Choice, Ticket
from antiphon_policy.latency import StepModel
from antiphon_policy.routing import RouteDecision, RouteRequest, WorkerRole, WorkerView
from antiphon_policy.worker_table import WorkerTable
from antiphon_proto import worker_pb2 as pb
from opentelemetry.trace import INVALID_SPAN

FLEETS = (4, 16, 64, 256, 1000)
ROUNDS = 15
REQUESTS = 300
REQUEST = RouteRequest(prompt_tokens=2000, block_tokens=64, block_bytes=1 << 20, max_tokens=128)
CHOICE = cast(Choice, SimpleNamespace(index=0, submits=1, group=SimpleNamespace(revision="r"), output=[]))
LEADING = {"w0": 3, "w1": 8, "w2": 30}


def fleet(size: int) -> WorkerTable:
    table = WorkerTable()
    for number in range(size):
        role = WorkerRole.DECODE if number % 2 else WorkerRole.PREFILL
        table.put(WorkerView(f"worker-{number}", role, 0, 1000 + number, 5, 9000 + number, 900, 1000, StepModel()))
    return table


def ticket() -> Ticket:
    return Ticket(uuid.uuid4().hex, "", b"", "", INVALID_SPAN, time.monotonic())


def follow(store: ExplainStore, table: WorkerTable, decision: RouteDecision, arrived: Ticket) -> Trail:
    """All that one request tells its trail."""
    trail = Trail(arrived, "req-" + arrived.request_id, "/v1/completions", "gateway")
    trail.queued("model")
    store.keep(trail)
    inputs = RouteInputs(REQUEST, 0.3, tuple(table.views()), LEADING, table.links, table.workload)
    outcome = trail.submitted(CHOICE, inputs, decision).outcome
    outcome.accepted(1.0)
    outcome.began(_FIRST, 2.0)
    outcome.end(OutcomeState.FINISHED, 3.0, "", 10, 3.0)
    outcome.finished(_LAST)
    trail.end(200, "")
    return trail


_FIRST = pb.RequestStep(token_ids=[1], usage=pb.Usage(cached_tokens=3))
_LAST = pb.RequestStep(token_ids=[1], finish=pb.FINISH_STOP, usage=pb.Usage(cached_tokens=3))


def microseconds(table: WorkerTable) -> tuple[float, float]:
    """(trail, headers) of one request."""
    decision = table.choose(REQUEST, LEADING, 0.3)
    store = ExplainStore(2000, 64 * 1024 * 1024)
    tickets = [ticket() for _ in range(REQUESTS)]
    begin = time.perf_counter()
    for arrived in tickets:
        trail = follow(store, table, decision, arrived)
    between = time.perf_counter()
    for _ in tickets:
        trail.headers()
    end = time.perf_counter()
    return (between - begin) / REQUESTS * 1e6, (end - between) / REQUESTS * 1e6


def kept_bytes(size: int) -> tuple[int, int]:
    """(measured, estimated) for one request, where every worker's figures change between two requests."""
    store = ExplainStore(2000, 64 * 1024 * 1024)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(REQUESTS):
        table = fleet(size)
        follow(store, table, table.choose(REQUEST, LEADING, 0.3), ticket())
    del table
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) // REQUESTS, store.size_bytes // REQUESTS


def main() -> None:
    tables = {size: fleet(size) for size in FLEETS}
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in FLEETS}
    for _ in range(ROUNDS):
        for size, table in tables.items():
            found[size].append(microseconds(table))
    print("workers  trail us (median)  headers us  bytes measured  estimated")
    for size, rounds in found.items():
        trails = [trail for trail, _ in rounds]
        measured, estimated = kept_bytes(size)
        print(
            f"{size:7d}  {min(trails):8.1f} ({statistics.median(trails):6.1f})  "
            f"{min(headers for _, headers in rounds):10.1f}  {measured:14d}  {estimated:9d}"
        )


if __name__ == "__main__":
    main()
