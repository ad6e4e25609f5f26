"""Faults that users of other gateways reported, where no other test of ours is about them (docs/faults.md has all)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from antiphon_gateway.openapi import OPERATIONS
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import FakeWorker, fake_workers
from tests.support.gateway import RunningGateway, eventually, running_gateway
from tests.support.membership import FakeEngine, announcing, record
from tests.support.valkey import Valkey

TEXT = "x" * 4000
SAY = [{"role": "user", "content": TEXT}]
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAY, "max_tokens": 4},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 4},
    "/v1/messages": {"messages": SAY, "max_tokens": 4},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 4},
}


class Pair:
    """A decode worker, a prefill worker, a gateway."""

    def __init__(self, decode: FakeWorker, running: RunningGateway) -> None:
        self.decode = decode
        self.running = running

    async def submitted(self, path: str, **changes: Any) -> pb.Submit:
        """What the decode worker is given for a request that is answered."""
        before = len(self.decode.submits)
        body = {"model": "test-model", **GENERATING[path], **changes}
        response = await self.running.client.post(path, json=body)
        assert response.status_code == 200, response.text
        [submit] = self.decode.submits[before:]
        return submit


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    decode = FakeWorker(worker_id="d", role=pb.ROLE_DECODE)
    async with running_gateway(decode, FakeWorker(worker_id="p", role=pb.ROLE_PREFILL)) as running:
        yield Pair(decode, running)


def test_every_endpoint_that_generates_is_asked_here() -> None:
    assert {operation.path for operation in OPERATIONS if operation.streams} == set(GENERATING)


@pytest.mark.parametrize("path", GENERATING)
async def test_every_endpoint_has_its_prompt_computed_by_a_prefill_worker(pair: Pair, path: str) -> None:
    """llm-d/llm-d-router#1461: an endpoint that the prefill pool was not told of ran on decode workers alone."""
    submit = await pair.submitted(path)
    assert [peer.worker_id for peer in submit.prefill] == ["p"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_how_an_answer_is_streamed_is_no_affair_of_prefill(pair: Pair, path: str) -> None:
    """vllm-project/router#2: stream_options beside an unstreamed prefill were refused, and decode computed it again."""
    whole = await pair.submitted(path, seed=1)
    streamed = await pair.submitted(path, seed=1, stream=True, stream_options={"include_usage": True})
    assert [peer.worker_id for peer in streamed.prefill] == [peer.worker_id for peer in whole.prefill] == ["p"]
    assert streamed.sampling == whole.sampling
    assert streamed.prompt_token_ids == whole.prompt_token_ids


async def test_a_worker_has_the_same_state_however_it_was_found() -> None:
    """vllm-project/router#299: workers that discovery found had no load, and no place in cache-aware routing."""
    found = []
    for by_redis in (False, True):
        decode = FakeWorker(worker_id="d", role=pb.ROLE_DECODE)
        prefill = FakeWorker(worker_id="p", role=pb.ROLE_PREFILL)
        for worker in (decode, prefill):
            worker.queue = pb.QueueState(running=3, waiting=2, waiting_tokens=500, free_blocks=700, total_blocks=1000)
        async with gateway_of(decode, prefill, by_redis=by_redis) as running:
            dispatcher = running.gateway.dispatcher
            await eventually(lambda dispatcher=dispatcher: len(list(dispatcher.loads())) == 2)  # type: ignore[misc]
            found.append({load.worker_id: load.view(load.said_at, draining=False) for load in dispatcher.loads()})
    by_address, by_redis_record = found
    assert by_address == by_redis_record
    assert {view.queued_tokens for view in by_address.values()} == {500}


@contextlib.asynccontextmanager
async def gateway_of(*workers: FakeWorker, by_redis: bool) -> AsyncIterator[RunningGateway]:
    if not by_redis:
        async with running_gateway(*workers) as running:
            yield running
        return
    with Valkey() as valkey:
        async with fake_workers(*workers), contextlib.AsyncExitStack() as stack:
            for worker in workers:
                own = record(
                    worker.worker_id,
                    f"{worker.worker_id}/1",
                    role="decode" if worker.role == pb.ROLE_DECODE else "prefill",
                    model=worker.card.model,
                    card_digest=worker.card.digest,
                    address=worker.address,
                )
                await stack.enter_async_context(announcing(valkey.url, FakeEngine(), own, ttl_ms=1000))
            async with running_gateway(redis_url=valkey.url) as running:
                yield running
