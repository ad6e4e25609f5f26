"""The choices of one prompt: the first computes it, the others follow to where it is."""

from __future__ import annotations

import asyncio
from typing import Any

from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import Connection, FakeWorker, answer_bytes, generate, tokens
from tests.support.gateway import RunningGateway, eventually, running_gateway

LONG: dict[str, Any] = {"model": "test-model", "prompt": "p" * 200, "max_tokens": 4, "seed": 3, "n": 3}


class Gate:
    """A behaviour that says nothing before it is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def __call__(self, worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        await self.opened.wait()
        await generate(worker, connection, submit)


async def ask(running: RunningGateway, **changes: Any) -> Any:
    response = await running.client.post("/v1/completions", json={**LONG, **changes})
    return response.status_code, response.json()


async def test_others_go_where_the_first_ones_prompt_was_computed_once_it_is() -> None:
    gate = Gate()
    first, other = FakeWorker(worker_id="first", behaviour=gate), FakeWorker(worker_id="other")
    other.queue.waiting_tokens = 400
    async with running_gateway(first, other) as running:
        asked = asyncio.create_task(ask(running))
        await eventually(lambda: len(first.submits) == 1)
        # By now the other one would be the better place, were it not for the blocks.
        first.queue.waiting_tokens, other.queue.waiting_tokens = 10, 0
        gate.opened.set()
        status, answer = await asked
        assert status == 200
        assert len(first.submits) == 3
        assert not other.submits
        assert [choice["text"] for choice in answer["choices"]] == [
            answer_bytes(submit).decode() for submit in sorted(first.submits, key=lambda one: one.sampling.choice)
        ]
        await eventually(lambda: running.at_rest)


async def test_each_prompt_of_a_list_has_a_first_one_and_short_ones_none() -> None:
    gate = Gate()
    worker = FakeWorker(behaviour=gate)
    async with running_gateway(worker) as running:
        asked = asyncio.create_task(ask(running, prompt=["a" * 200, "b" * 200, "short"], n=2))
        await eventually(lambda: len(worker.submits) == 4)
        gate.opened.set()
        status, answer = await asked
        assert (status, len(answer["choices"])) == (200, 6)
        assert len(worker.submits) == 6


async def test_a_first_one_that_moves_before_its_first_token_still_leads() -> None:
    async def gives_back(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        worker.queue.draining = True
        connection.step(submit.ref, finish=pb.FINISH_MOVED, error="it drains", queue=worker.queue)

    first, other = FakeWorker(worker_id="first", behaviour=gives_back), FakeWorker(worker_id="other")
    other.queue.waiting_tokens = 400
    async with running_gateway(first, other) as running:
        status, answer = await ask(running)
        assert (status, len(answer["choices"])) == (200, 3)
        assert (len(first.submits), len(other.submits)) == (1, 3)
        await eventually(lambda: running.at_rest)


async def test_a_first_one_that_fails_takes_the_others_along() -> None:
    async def fails(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        connection.step(submit.ref, finish=pb.FINISH_ERROR, error="it broke")

    async with running_gateway(FakeWorker(behaviour=fails)) as running:
        status, _ = await ask(running)
        assert status >= 500
        await eventually(lambda: running.at_rest)


async def test_a_client_that_leaves_takes_those_along_that_were_not_offered_yet() -> None:
    gate = Gate()
    worker = FakeWorker(behaviour=gate)
    async with running_gateway(worker) as running:
        asked = asyncio.create_task(ask(running, stream=True))
        await eventually(lambda: len(worker.submits) == 1)
        asked.cancel()
        await eventually(lambda: running.at_rest)
        assert len(worker.submits) == 1


async def test_they_follow_at_the_first_token_and_not_at_the_end() -> None:
    opened = asyncio.Event()

    async def slow(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        if submit.sampling.choice:
            await generate(worker, connection, submit)
            return
        connection.accept(submit.ref)
        await tokens(connection, submit, answer_bytes(submit)[:1], finish=False)
        await opened.wait()
        connection.step(submit.ref, text="!", finish=pb.FINISH_LENGTH)

    worker = FakeWorker(behaviour=slow)
    async with running_gateway(worker) as running:
        asked = asyncio.create_task(ask(running))
        await eventually(lambda: len(worker.submits) == 3)
        opened.set()
        assert (await asked)[0] == 200
