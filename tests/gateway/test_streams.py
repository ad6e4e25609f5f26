"""The stream between gateway and worker: greeting, heartbeats, loss, return, and what else travels on it."""

from __future__ import annotations

import asyncio

from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import Connection, FakeWorker, accept_and_hang, byte_card, generate
from tests.support.gateway import RunningGateway, eventually, running_gateway

CHAT = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


async def status(running: RunningGateway) -> int:
    return (await running.client.post("/v1/chat/completions", json=CHAT)).status_code


async def test_the_card_is_read_once_for_all_workers_that_have_it() -> None:
    workers = [FakeWorker(worker_id=f"w{index}") for index in range(3)]
    async with running_gateway(*workers) as running:
        assert sum(worker.cards_read for worker in workers) == 1
        assert await status(running) == 200


async def test_every_worker_hears_who_its_peers_are_when_membership_changes() -> None:
    first, second = FakeWorker(worker_id="w1"), FakeWorker(worker_id="w2", role=pb.ROLE_PREFILL)
    other = FakeWorker(byte_card("other-model"), worker_id="w3")
    async with running_gateway(first, second, other):
        await first.until(lambda: first.peers[-1:] == [["w2"]])
        await second.until(lambda: second.peers[-1:] == [["w1"]])
        await other.until(lambda: other.peers[-1:] == [[]])
        await second.stop()
        await first.until(lambda: first.peers[-1:] == [[]])


async def test_both_sides_are_heard_while_nothing_happens() -> None:
    worker = FakeWorker()
    async with running_gateway(worker) as running:
        await worker.until(lambda: worker.heartbeats >= 3)
        assert len(running.gateway.fleet.workers()) == 1


async def test_a_silent_worker_is_lost_and_its_requests_with_it() -> None:
    """ai-dynamo/dynamo#13855 and its kin: nothing may wait for a peer that is not there."""
    worker = FakeWorker(behaviour=accept_and_hang)
    async with running_gateway(worker) as running:
        pending = asyncio.create_task(running.client.post("/v1/chat/completions", json=CHAT))
        await worker.until(lambda: worker.running == 1)
        worker.silent = True
        response = await pending
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "worker_failed"
        assert "silent" in response.json()["error"]["message"]
        assert response.headers["retry-after"]
        await eventually(lambda: running.at_rest)
        worker.silent, worker.behaviour = False, generate
        await eventually(lambda: len(running.gateway.fleet.workers()) == 1)
        assert await status(running) == 200


async def test_a_worker_that_stops_is_gone_at_once_and_used_again_when_it_is_back() -> None:
    worker = FakeWorker()
    async with running_gateway(worker) as running:
        port = int(worker.address.rsplit(":", 1)[1])
        await worker.stop()
        await eventually(lambda: not running.gateway.fleet.workers())
        response = await running.client.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
        assert response.headers["retry-after"]
        assert (await running.client.get("/ready")).status_code == 503
        await worker.start(port)
        await eventually(lambda: len(running.gateway.fleet.workers()) == 1)
        assert await status(running) == 200
        assert worker.cards_read == 1


async def test_a_worker_at_two_addresses_counts_once() -> None:
    first, second = FakeWorker(worker_id="same"), FakeWorker(worker_id="same")
    async with running_gateway(first) as running:
        await second.start()
        try:
            running.gateway.fleet._static = (first.address, second.address)
            running.gateway.fleet._reconcile()
            await second.until(lambda: bool(second.connections))
            assert len(running.gateway.fleet.workers()) == 1
            await first.stop()
            await eventually(
                lambda: [client.address for client in running.gateway.fleet.workers().values()] == [second.address]
            )
            assert await status(running) == 200
        finally:
            await second.stop()


async def test_messages_for_requests_that_are_gone_are_ignored() -> None:
    async def late(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.step(99, token_ids=[1], text="x", finish=pb.FINISH_STOP)
        connection.refuse(98, pb.REFUSAL_CAPACITY)
        connection.accept(97)
        await generate(worker, connection, submit)
        connection.step(submit.ref, token_ids=[1], text="after the end")

    async with running_gateway(FakeWorker(behaviour=late)) as running:
        assert await status(running) == 200
        assert await status(running) == 200


async def test_a_worker_whose_card_cannot_be_used_is_not_used() -> None:
    broken = byte_card()
    broken.tokenizer_json = b"{}"
    worker = FakeWorker(broken)
    good = FakeWorker(byte_card("good-model"), worker_id="w2")
    async with running_gateway(good) as running:
        await worker.start()
        try:
            running.gateway.fleet._static = (good.address, worker.address)
            running.gateway.fleet._reconcile()
            await eventually(lambda: worker.cards_read >= 2)
            assert list(running.gateway.fleet.workers()) == ["w2"]
            assert await status(running) == 404
        finally:
            await worker.stop()
