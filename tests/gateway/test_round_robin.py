"""`--routing round-robin`: each in turn, whatever the cache and the load say."""

from __future__ import annotations

from collections import Counter

import pytest
from antiphon_gateway.round_robin import RoundRobin
from antiphon_policy.latency import StepModel
from antiphon_policy.routing import NoWorker, RouteReason, RouteRequest, WorkerRole, WorkerView
from antiphon_policy.worker_table import WorkerTable
from msgspec.structs import replace

from tests.support.fake_worker import FakeWorker
from tests.support.gateway import running_gateway

REQUEST = RouteRequest(prompt_tokens=1001, block_tokens=64, block_bytes=1000, max_tokens=8)


def view(worker_id: str, role: WorkerRole = WorkerRole.DECODE, *, queued_tokens: int = 0) -> WorkerView:
    return WorkerView(worker_id, role, 0, queued_tokens, 0, 0, 1000, 1000, StepModel())


def table_of(*views: WorkerView) -> WorkerTable:
    table = WorkerTable()
    for one in views:
        table.put(one)
    return table


def test_each_side_in_turn_without_a_look_at_load_or_cache() -> None:
    prefills = [view("p1", WorkerRole.PREFILL), view("p0", WorkerRole.PREFILL, queued_tokens=90_000)]
    prefills.append(view("p2", WorkerRole.PREFILL))
    routing = RoundRobin(table_of(*prefills, view("d1"), view("d0")))
    made = [routing.choose(REQUEST, {"p2": 15, "d0": 15}, 0.5) for _ in range(6)]
    assert [(one.decode, one.prefill) for one in made] == [
        ("d0", "p0"),
        ("d1", "p1"),
        ("d0", "p2"),
        ("d1", "p0"),
        ("d0", "p1"),
        ("d1", "p2"),
    ]
    assert made[0].prefill_fallbacks == ("p1", "p2")
    assert {one.reason for one in made} == {RouteReason.ROUND_ROBIN}
    assert not any(one.prefix_peers for one in made)
    # What they hold is said all the same, as far as it can be used.
    assert [one.prefill_blocks for one in made[:3]] == [0, 0, 15]
    assert (made[0].decode_blocks, made[0].usable_blocks) == (15, 15)


def test_without_prefill_workers_each_computes_its_own_prompts() -> None:
    routing = RoundRobin(table_of(view("b0", WorkerRole.BOTH), view("b1", WorkerRole.BOTH)))
    made = [routing.choose(REQUEST, {"b1": 3}, 0.0) for _ in range(2)]
    assert [(one.decode, one.prefill, one.prefill_blocks) for one in made] == [("b0", None, 0), ("b1", None, 3)]


def test_nobody_gets_a_turn_who_may_not_be_used() -> None:
    table = table_of(replace(view("d0"), draining=True), replace(view("d1"), may_decode=False), view("d2"), view("d3"))
    table.put(view("p0", WorkerRole.PREFILL))
    table.put(replace(view("p1", WorkerRole.PREFILL), draining=True))
    routing = RoundRobin(table)
    made = [routing.choose(REQUEST, {}, 0.0, excluded=("d3",)) for _ in range(4)]
    assert {(one.decode, one.prefill, one.prefill_fallbacks) for one in made} == {("d2", "p0", ())}
    with pytest.raises(NoWorker, match="role decode or both"):
        routing.choose(REQUEST, {}, 0.0, excluded=("d2", "d3"))


async def test_a_gateway_that_is_told_so_takes_turns() -> None:
    workers = [FakeWorker(worker_id="w0"), FakeWorker(worker_id="w1"), FakeWorker(worker_id="w2")]
    workers[0].queue.waiting_tokens = 5000
    async with running_gateway(*workers, routing="round-robin") as running:
        routes = []
        for _ in range(9):
            body = {"model": "test-model", "prompt": "x" * 300, "max_tokens": 2}
            answer = await running.client.post("/v1/completions", json=body)
            assert answer.status_code == 200
            routes.append(dict(part.split("=") for part in answer.headers["x-antiphon-route"].split(";")))
    assert Counter(route["decode"] for route in routes) == {"w0": 3, "w1": 3, "w2": 3}
    assert {route["reason"] for route in routes} == {"round_robin"}
