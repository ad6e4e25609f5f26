"""What the gateway's counters say was processed: also of requests that failed, were left, or nobody came to."""

from __future__ import annotations

import asyncio

import pytest
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import Connection, FakeWorker, accept_and_hang, tokens
from tests.support.gateway import RunningGateway, eventually, running_gateway

BODY = {"model": "test-model", "prompt": "hello", "max_tokens": 9, "stream": True}
PROMPT_TOKENS = 5


def counted(running: RunningGateway) -> tuple[float, float]:
    """(prompt tokens, completion tokens)."""
    return (
        running.metric("antiphon_gateway_prompt_tokens_total"),
        running.metric("antiphon_gateway_completion_tokens_total"),
    )


async def three_and_silence(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    connection.accept(submit.ref)
    await tokens(connection, submit, b"abc", finish=False)
    await asyncio.Event().wait()


async def three_and_a_failure(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    connection.accept(submit.ref)
    await tokens(connection, submit, b"abc", finish=False)
    connection.step(submit.ref, finish=pb.FINISH_ERROR, error="out of luck")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_client_left_counts_as_far_as_it_came(stream: bool) -> None:
    async with running_gateway(FakeWorker(behaviour=three_and_silence)) as running:
        asking = asyncio.create_task(running.client.post("/v1/completions", json={**BODY, "stream": stream}))
        await eventually(lambda: [flight.completion_tokens for flight in running.gateway.generation.flights] == [3])
        asking.cancel()
        await eventually(lambda: running.at_rest)
        assert counted(running) == (PROMPT_TOKENS, 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_failed_counts_as_far_as_it_came(stream: bool) -> None:
    async with running_gateway(FakeWorker(behaviour=three_and_a_failure)) as running:
        response = await running.client.post("/v1/completions", json={**BODY, "stream": stream})
        assert "out of luck" in response.text
        assert "usage" not in response.text
        await eventually(lambda: running.at_rest)
        assert counted(running) == (PROMPT_TOKENS, 3)


async def test_what_was_never_computed_does_not_count() -> None:
    worker = FakeWorker(behaviour=accept_and_hang)
    async with running_gateway(worker) as running:
        asking = asyncio.create_task(running.client.post("/v1/completions", json=BODY))
        await worker.until(lambda: worker.running == 1)
        asking.cancel()
        await eventually(lambda: running.at_rest)
        response = await running.client.post("/v1/completions", json={**BODY, "max_tokens": 0, "echo": True})
        assert response.status_code == 200
        assert counted(running) == (0, 0)


async def test_of_several_prompts_those_count_that_were_computed() -> None:
    async def first_only(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        behaviour = three_and_silence if len(submit.prompt_token_ids) == PROMPT_TOKENS else accept_and_hang
        await behaviour(worker, connection, submit)

    worker = FakeWorker(behaviour=first_only)
    async with running_gateway(worker) as running:
        body = {**BODY, "prompt": ["hello", "a longer one"], "n": 2}
        asking = asyncio.create_task(running.client.post("/v1/completions", json=body))
        await worker.until(lambda: worker.running == 4)
        await eventually(lambda: [flight.completion_tokens for flight in running.gateway.generation.flights] == [6])
        asking.cancel()
        await eventually(lambda: running.at_rest)
        assert counted(running) == (PROMPT_TOKENS, 6)
