"""Workers found in Redis (a real Valkey), and how little the gateway depends on it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import FakeWorker, accept_and_hang, byte_card, fake_workers
from tests.support.gateway import RunningGateway, eventually, running_gateway
from tests.support.membership import FakeEngine, announcing, record
from tests.support.valkey import Valkey

CHAT: dict[str, Any] = {
    "model": "test-model",
    "messages": [{"role": "user", "content": "hello " * 100}],
    "max_tokens": 4,
}


@pytest.fixture
def valkey() -> Any:
    with Valkey() as server:
        yield server


@contextlib.asynccontextmanager
async def announced(url: str, worker: FakeWorker) -> AsyncIterator[FakeEngine]:
    """The worker writes its record and its blocks, until the end."""
    engine = FakeEngine()
    roles = {pb.ROLE_BOTH: "both", pb.ROLE_DECODE: "decode", pb.ROLE_PREFILL: "prefill"}
    own = record(
        worker.worker_id,
        f"{worker.worker_id}/1",
        role=roles[worker.role],
        model=worker.card.model,
        card_digest=worker.card.digest,
        address=worker.address,
    )
    async with announcing(url, engine, own, ttl_ms=1000):
        yield engine


async def serves(running: RunningGateway) -> bool:
    return (await running.client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_worker_is_found_and_stays_while_its_stream_stands_whatever_redis_says(valkey: Valkey) -> None:
    worker = FakeWorker()
    async with fake_workers(worker), running_gateway(redis_url=valkey.url) as running:
        workers = running.gateway.fleet.workers()
        async with announced(valkey.url, worker):
            await eventually(lambda: len(workers) == 1)
            assert await serves(running)
            assert (await running.client.get("/ready")).json()["redis"] == "ok"
        # Its record lapses; it does not.
        await eventually(lambda: not running.gateway.fleet.announced_models())
        assert await serves(running)
        # When it goes too, it is not tried again.
        await worker.stop()
        await eventually(lambda: not running.gateway.fleet._clients)
        assert (await running.client.post("/v1/chat/completions", json=CHAT)).status_code == 503


async def test_requests_are_served_while_redis_is_down(valkey: Valkey) -> None:
    worker = FakeWorker()
    async with fake_workers(worker), running_gateway(redis_url=valkey.url) as running, announced(valkey.url, worker):
        await eventually(lambda: len(running.gateway.fleet.workers()) == 1)
        valkey.kill()
        await eventually(lambda: running.gateway.fleet.mirror_healthy is False)
        assert await serves(running)
        assert (await running.client.get("/ready")).json()["redis"] == "down"
        valkey.start()
        await eventually(lambda: running.gateway.fleet.mirror_healthy is True)
        assert await serves(running)


async def test_a_prompt_goes_to_the_worker_that_holds_its_prefix(valkey: Valkey) -> None:
    """vllm-project/production-stack#1045: the blocks looked for are those of the rendered, tokenised prompt."""
    # Blocks are large, so that moving them costs more than a near tie.
    card = byte_card(block_bytes=8 * 1024 * 1024)
    first, second = FakeWorker(card, worker_id="w1"), FakeWorker(card, worker_id="w2")
    async with (
        fake_workers(first, second),
        running_gateway(redis_url=valkey.url) as running,
        announced(valkey.url, first) as one,
        announced(valkey.url, second) as two,
    ):
        await eventually(lambda: len(running.gateway.fleet.workers()) == 2)
        assert await serves(running)
        prompt = (first.submits + second.submits)[0].prompt_token_ids
        model = running.gateway.models.get("test-model")
        assert model is not None
        chain = model.prompt(list(prompt), b"").chain
        assert len(chain) == len(prompt) // 64 >= 5
        for engine, worker in ((one, first), (two, second), (one, first)):
            engine.change(set(chain), set())
            held = {worker.worker_id: len(chain)}
            await eventually(lambda held=held: running.gateway.fleet.leading_blocks(model, chain) == held)  # type: ignore[misc]
            before = len(worker.submits)
            for _ in range(4):
                assert await serves(running)
            assert len(worker.submits) == before + 4
            engine.change(set(), set(chain))
            await eventually(lambda: not running.gateway.fleet.leading_blocks(model, chain))


async def test_tenants_do_not_see_each_others_blocks(valkey: Valkey) -> None:
    """llm-d/llm-d-kv-cache#243: equal prompts of two tenants have no block in common."""
    async with running_gateway(FakeWorker()) as running:
        model = running.gateway.models.get("test-model")
        assert model is not None
        ids = list(range(200))
        chains = [set(model.prompt(ids, salt).chain) for salt in (b"", b"a", b"b")]
        assert not chains[0] & chains[1]
        assert not chains[1] & chains[2]


async def test_a_model_whose_worker_cannot_be_reached_is_known_but_has_no_worker(valkey: Valkey) -> None:
    worker = FakeWorker()
    await worker.start()
    await worker.stop()
    async with running_gateway(redis_url=valkey.url) as running, announced(valkey.url, worker):
        await eventually(lambda: "test-model" in running.gateway.fleet.announced_models())
        response = await running.client.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
        other = await running.client.post("/v1/chat/completions", json={**CHAT, "model": "other"})
        assert other.status_code == 404


async def test_a_restarted_gateway_finds_all_models_again(valkey: Valkey) -> None:
    """ai-dynamo/dynamo#4904: what a restart finds is what is there, and readiness says the same as the list."""
    workers = [FakeWorker(byte_card(f"model-{index}"), worker_id=f"w{index}") for index in range(4)]
    async with fake_workers(*workers), contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(announced(valkey.url, worker))
        for _ in range(2):
            async with running_gateway(redis_url=valkey.url) as running:
                await eventually(lambda running=running: len(running.gateway.fleet.workers()) == 4)  # type: ignore[misc]
                listed = {model["id"] for model in (await running.client.get("/v1/models")).json()["data"]}
                ready = set((await running.client.get("/ready")).json()["models"])
                assert listed == ready == {f"model-{index}" for index in range(4)}


async def test_killing_redis_under_a_waiting_request_changes_nothing(valkey: Valkey) -> None:
    worker = FakeWorker(behaviour=accept_and_hang)
    async with fake_workers(worker), running_gateway(redis_url=valkey.url) as running, announced(valkey.url, worker):
        await eventually(lambda: len(running.gateway.fleet.workers()) == 1)
        pending = asyncio.create_task(running.client.post("/v1/chat/completions", json=CHAT))
        await worker.until(lambda: worker.running == 1)
        valkey.kill()
        await eventually(lambda: running.gateway.fleet.mirror_healthy is False)
        connection = worker.connections[0]
        connection.step(worker.submits[0].ref, token_ids=[97], text="a", finish=pb.FINISH_STOP)
        assert (await pending).json()["choices"][0]["message"]["content"] == "a"
