"""A promise that grows with what has to be computed counts wherever the gateway orders, routes and holds by it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from antiphon_gateway.explain import RouteInputs

from tests.support.fake_worker import FakeWorker
from tests.support.gateway import RunningGateway, eventually, running_gateway
from tests.support.model_records import model_record

MODEL = "test-model"
RECORD = model_record(MODEL, names=(MODEL,), ttft_p95_ms=50_000.0, ttft_per_thousand_tokens_ms=10_000.0)
BLOCK = 64


async def ask(running: RunningGateway, tokens: int, **headers: str) -> Any:
    body = {"model": MODEL, "prompt": [7] * tokens, "max_tokens": 1}
    return await running.client.post("/v1/completions", json=body, headers=headers)


def promise(running: RunningGateway, record: Any = RECORD) -> None:
    running.gateway.fleet.catalogue.update({MODEL: record})


def held(running: RunningGateway, blocks: int) -> None:
    """Of every prompt, the worker holds so many leading blocks."""

    def leading(model: Any, chain: Any) -> Mapping[str, int]:
        return {"worker-1": blocks}

    running.gateway.fleet.leading_blocks = leading  # type: ignore[method-assign]


async def due_after_ms(running: RunningGateway, *requests: asyncio.Task[Any]) -> list[float]:
    """Of what waits, from its arrival."""
    dispatcher = running.gateway.dispatcher
    await eventually(lambda: dispatcher.waiting == len(requests))
    entries = [entry for queue in dispatcher._queues.values() for entry in queue.line]
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    assert all(entry.due_ms is not None for entry in entries)
    return [round((entry.due_ms or 0.0) - entry.arrived_ms) for entry in entries]


def routed_by(running: RunningGateway, request_id: str) -> RouteInputs:
    trail = running.gateway.explain.find(request_id, "")
    record = trail.current() if trail is not None else None
    assert record is not None
    return record.inputs


async def test_a_longer_prompt_is_due_later() -> None:
    worker = FakeWorker()
    worker.queue.waiting_tokens = 100_000
    async with running_gateway(worker) as running:
        promise(running)
        requests = [asyncio.create_task(ask(running, tokens)) for tokens in (2000, 100)]
        assert sorted(await due_after_ms(running, *requests)) == [51_000, 70_000]


async def test_what_is_cached_is_promised_no_time() -> None:
    worker = FakeWorker()
    worker.queue.waiting_tokens = 100_000
    async with running_gateway(worker) as running:
        promise(running)
        held(running, 16)
        requests = [asyncio.create_task(ask(running, 2000)) for _ in range(2)]
        expected = 50_000 + round(10.0 * (2000 - 16 * BLOCK))
        assert await due_after_ms(running, *requests) == [expected, expected]


async def test_a_client_that_gives_up_sooner_is_due_sooner() -> None:
    worker = FakeWorker()
    worker.queue.waiting_tokens = 100_000
    async with running_gateway(worker) as running:
        promise(running)
        request = asyncio.create_task(ask(running, 2000, **{"x-request-timeout-ms": "60000"}))
        assert await due_after_ms(running, request) == [60_000]


async def test_routing_is_told_what_is_left_of_the_promise_and_what_the_others_have() -> None:
    async with running_gateway(FakeWorker()) as running:
        promise(running)
        held(running, 16)
        response = await ask(running, 2000, **{"x-request-id": "one"})
        assert response.status_code == 200
        inputs = routed_by(running, "one")
        assert inputs.request.ttft_limit_ms is not None
        # What it has waited is taken off.
        assert 50_000 < inputs.request.ttft_limit_ms <= 50_000 + 9_760
        assert inputs.workload.ttft_limit_ms == pytest.approx(50_000 + 10.0 * inputs.workload.uncached_tokens)


async def test_without_a_base_nothing_is_promised() -> None:
    assert model_record(ttft_per_thousand_tokens_ms=60.0).ttft_limit_ms(2000) is None
    assert model_record(ttft_p95_ms=500.0).ttft_limit_ms(2000) == 500.0
    assert model_record(ttft_p95_ms=500.0, ttft_per_thousand_tokens_ms=60.0).ttft_limit_ms(2000) == 620.0
