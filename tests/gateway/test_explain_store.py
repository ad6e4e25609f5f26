"""What is kept of past requests is bounded: by number, by bytes, by attempts, and by workers of a large fleet."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

from antiphon_gateway.explain import (
    ATTEMPTS_KEPT,
    CHOICES_KEPT,
    LINK_BYTES,
    TRAIL_BYTES,
    WORKERS_KEPT,
    OutcomeState,
    RouteInputs,
    RouteRecord,
    Trail,
)
from antiphon_gateway.explain_document import explain
from antiphon_gateway.explain_replay import replay
from antiphon_gateway.explain_store import ExplainStore
from antiphon_gateway.flight import Choice, Ticket
from antiphon_policy.latency import StepModel
from antiphon_policy.routing import RouteRequest, WorkerRole, WorkerView, Workload
from antiphon_policy.worker_table import WorkerTable
from opentelemetry.trace import INVALID_SPAN

REQUEST = RouteRequest(prompt_tokens=2000, block_tokens=64, block_bytes=1 << 20, max_tokens=64)
PLENTY = 1 << 30


def trail(number: int, client_id: str = "", tenant: str = "") -> Trail:
    return Trail(Ticket(f"{number:032x}", tenant, b"", "", INVALID_SPAN, time.monotonic()), client_id)


def choice(index: int = 0, submits: int = 1) -> Choice:
    """As much of one as a trail reads."""
    return cast(Choice, SimpleNamespace(index=index, submits=submits, group=SimpleNamespace(revision="r"), output=[]))


def workers(count: int) -> tuple[WorkerView, ...]:
    roles = (WorkerRole.DECODE, WorkerRole.PREFILL)
    return tuple(
        WorkerView(f"w{number}", roles[number % 2], 0, 100 * number, number, 500 * number, 900, 1000, StepModel())
        for number in range(count)
    )


def submit(
    to: Trail, count: int = 2, *, index: int = 0, submits: int = 1, links: dict[tuple[str, str], float] | None = None
) -> RouteRecord:
    """Decide among `count` workers, and tell the trail."""
    table = WorkerTable(links)
    for view in workers(count):
        table.put(view)
    leading = {f"w{number}": number % 30 for number in range(count)}
    decision = table.choose(REQUEST, leading, 0.4)
    inputs = RouteInputs(REQUEST, 0.4, tuple(table.views()), leading, table.links, Workload())
    return to.submitted(choice(index, submits), inputs, decision)


def test_the_last_requests_are_kept_and_the_oldest_forgotten() -> None:
    store = ExplainStore(3, PLENTY)
    trails = [trail(number, f"client-{number}") for number in range(5)]
    for one in trails:
        store.keep(one)
        submit(one)
    assert len(store) == 3
    assert [store.find(one.request_id, "") is one for one in trails] == [False, False, True, True, True]
    assert [store.find(one.client_request_id, "") is one for one in trails] == [False, False, True, True, True]
    store.keep(trails[-1])
    assert len(store) == 3


def test_a_name_that_clients_use_again_means_the_last_request() -> None:
    store = ExplainStore(2, PLENTY)
    first, second, third = (trail(number, "same") for number in range(3))
    store.keep(first)
    store.keep(second)
    assert store.find("same", "") is second
    # The first one is forgotten, and the name still means the one that came after it.
    store.keep(third)
    assert store.find(first.request_id, "") is None
    assert store.find("same", "") is third


def test_bytes_are_bounded_also_by_what_requests_grow_to_later() -> None:
    store = ExplainStore(1000, 30 * TRAIL_BYTES)
    trails = [trail(number) for number in range(20)]
    for one in trails:
        store.keep(one)
    assert len(store) == 20
    for one in reversed(trails):
        submit(one, 16)
    assert 0 < len(store) < 20
    assert store.size_bytes <= 30 * TRAIL_BYTES
    assert store.find(trails[0].request_id, "") is None
    # One that is forgotten goes on being told, for its own header, and costs the store nothing.
    before = store.size_bytes
    submit(trails[0], submits=2)
    assert trails[0].headers()[1][1].endswith(b";attempt=2")
    assert store.size_bytes == before


def test_a_table_of_links_is_counted_once_and_until_nobody_refers_to_it() -> None:
    store = ExplainStore(2, PLENTY)
    links = {(f"w{reader}", f"w{holder}"): 2.0 for reader in range(10) for holder in range(10)}
    alone, with_links = ExplainStore(2, PLENTY), store
    for name in range(2):
        for kept, table in ((alone, None), (with_links, links)):
            one = trail(name)
            kept.keep(one)
            submit(one, links=table)
    assert with_links.size_bytes - alone.size_bytes == len(links) * LINK_BYTES
    for name in (2, 3):
        one = trail(name)
        with_links.keep(one)
        submit(one)
    assert with_links.size_bytes == alone.size_bytes


def test_of_many_attempts_the_first_and_the_last_are_kept() -> None:
    store = ExplainStore(10, PLENTY)
    one = trail(1)
    store.keep(one)
    sizes = []
    for number in range(1, 101):
        submit(one, submits=number).outcome.end(OutcomeState.REFUSED, time.monotonic(), "full", 0, 0.0)
        sizes.append(store.size_bytes)
    (found,) = explain(one).choices
    last = list(range(100 - ATTEMPTS_KEPT + 2, 101))
    assert [attempt.number for attempt in found.attempts] == [1, *last]
    assert found.attempts_left_out == 100 - ATTEMPTS_KEPT
    assert sizes[-1] == sizes[ATTEMPTS_KEPT]


def test_of_many_choices_only_so_many_are_kept() -> None:
    one = trail(1)
    for index in range(40):
        submit(one, index=index)
    found = explain(one)
    assert len(found.choices) == CHOICES_KEPT
    assert found.choices_left_out == 40 - CHOICES_KEPT


def test_of_a_large_fleet_the_workers_that_were_considered_are_kept_and_replayed() -> None:
    store = ExplainStore(10, PLENTY)
    one = trail(1)
    store.keep(one)
    links = {("w0", "w1"): 3.0, ("w1", "w0"): 4.0, ("w600", "w601"): 5.0}
    record = submit(one, 1000, links=links)
    kept = {view.worker_id for view in record.inputs.workers}
    decision = record.decision
    assert len(kept) < WORKERS_KEPT
    assert {decision.decode, decision.prefill, *decision.prefill_fallbacks} <= kept
    assert {option.decode for option in decision.alternatives} <= kept
    assert set(record.inputs.links) <= set(links)
    assert ("w600", "w601") not in record.inputs.links
    (attempt,) = explain(one).choices[0].attempts
    again = replay(attempt)
    assert not again.whole
    assert again.decision is not None
    assert (again.decision.decode, again.decision.prefill) == (decision.decode, decision.prefill)


def test_a_header_has_only_what_headers_may_have() -> None:
    one = trail(1)
    table = WorkerTable()
    table.put(WorkerView("wörker 1;x=\r\n" + "y" * 500, WorkerRole.BOTH, 0, 0, 0, 0, 9, 9, StepModel()))
    decision = table.choose(REQUEST, {}, 0.0)
    one.submitted(choice(), RouteInputs(REQUEST, 0.0, tuple(table.views()), {}, {}, Workload()), decision)
    value = one.headers()[1][1]
    assert value.startswith(b"decode=w_rker_1_x___yyy")
    assert len(value) < 256
    assert b"\n" not in value
    assert value.isascii()
