"""A worker that dies with an answer half made: another one goes on with it, and the client sees nothing of that."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import (
    Behaviour,
    Connection,
    FakeWorker,
    accept_and_hang,
    answer_bytes,
    token_ids_of_bytes,
    tokens,
)
from tests.support.gateway import RunningGateway, eventually, running_gateway
from tests.support.house import House, Streamed
from tests.support.workers import TIMED, WorkerProcess, prompt_of

BODY: dict[str, Any] = {"model": "test-model", "prompt": "hello", "max_tokens": 12, "seed": 3}


def ending_after(count: int, *, lost: bool, cached_tokens: int = 0) -> Behaviour:
    """Sends so many tokens more, then breaks."""

    async def behaviour(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        begin = len(submit.output_token_ids)
        data = answer_bytes(submit)[begin : begin + count]
        await tokens(connection, submit, data, finish=False, cached_tokens=cached_tokens)
        if lost:
            connection.close()
        else:
            connection.step(submit.ref, finish=pb.FINISH_ERROR, error="out of luck")

    return behaviour


async def going_on(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    """Answers from where the output so far ends."""
    connection.accept(submit.ref)
    data = answer_bytes(submit)[len(submit.output_token_ids) :]
    ids = token_ids_of_bytes()
    for position, byte in enumerate(data):
        last = position == len(data) - 1
        usage = pb.Usage(prompt_tokens=5, cached_tokens=4, completion_tokens=12) if position == 0 or last else None
        finish = pb.FINISH_LENGTH if last else pb.FINISH_NONE
        connection.step(submit.ref, token_ids=[ids[byte]], text=chr(byte), usage=usage, finish=finish)
        await asyncio.sleep(0)


async def ask(running: RunningGateway, **changes: Any) -> httpx.Response:
    return await running.client.post("/v1/completions", json={**BODY, **changes})


def busy(worker_id: str, behaviour: Behaviour) -> FakeWorker:
    """One that is chosen only where there is no other."""
    worker = FakeWorker(worker_id=worker_id, behaviour=behaviour)
    worker.queue.waiting_tokens = 10_000
    return worker


@pytest.mark.parametrize("lost", [True, False])
async def test_the_answer_goes_on_where_it_stopped_and_usage_counts_once(lost: bool) -> None:
    async with running_gateway(FakeWorker(behaviour=going_on)) as running:
        whole = (await ask(running)).json()
    for stream in (False, True):
        dying = FakeWorker(worker_id="dying", behaviour=ending_after(5, lost=lost, cached_tokens=2))
        other = busy("other", going_on)
        async with running_gateway(dying, other) as running:
            response = await ask(running, stream=stream, stream_options={"include_usage": True} if stream else None)
            assert response.status_code == 200
            if stream:
                events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
                assert events[-1] == "[DONE]"
                chunks = [json.loads(event) for event in events[:-1]]
                text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
                usage = chunks[-1]["usage"]
            else:
                text, usage = response.json()["choices"][0]["text"], response.json()["usage"]
            assert text == whole["choices"][0]["text"]
            assert usage["completion_tokens"] == 12
            assert usage["prompt_tokens_details"]["cached_tokens"] == 2
            (submit,) = other.submits
            assert list(submit.output_token_ids) == [token_ids_of_bytes()[byte] for byte in answer_bytes(submit)[:5]]
            assert submit.sampling == dying.submits[0].sampling
            assert running.metric("antiphon_gateway_retries_total") == 1
            await eventually(lambda running=running: running.at_rest)  # type: ignore[misc]


async def test_one_request_does_not_go_through_all_workers() -> None:
    workers = [FakeWorker(worker_id=f"w{number}", behaviour=ending_after(1, lost=False)) for number in range(5)]
    async with running_gateway(*workers) as running:
        response = await ask(running, stream=True)
        assert json.loads(response.text.rstrip().split("\n\n")[-1].removeprefix("data: "))["error"]["code"] == (
            "worker_failed"
        )
        assert sum(len(worker.submits) for worker in workers) == 3
        await eventually(lambda: running.at_rest)


async def test_an_answer_that_waits_for_another_worker_has_a_time_of_its_own_for_that() -> None:
    """The time for which it was served does not count as waiting."""
    served = asyncio.Event()

    async def dying(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        if served.is_set():
            connection.refuse(submit.ref, pb.REFUSAL_DRAINING)
            return
        connection.accept(submit.ref)
        await tokens(connection, submit, answer_bytes(submit)[:2], finish=False)
        await served.wait()
        connection.close()

    refusals = [2]

    async def full_at_first(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        refusals[0] -= 1
        if refusals[0] >= 0:
            connection.refuse(submit.ref, pb.REFUSAL_CAPACITY)
        else:
            await going_on(worker, connection, submit)

    first, other = FakeWorker(worker_id="first", behaviour=dying), busy("other", full_at_first)
    async with running_gateway(first, other, queue_timeout_s=1.0) as running:
        asking = asyncio.create_task(ask(running))
        await asyncio.sleep(1.2)
        served.set()
        assert (await asking).status_code == 200


async def test_a_stalled_answer_is_not_taken_elsewhere() -> None:
    """Nobody knows whether its worker computes or hangs, and the client has waited long enough."""
    worker, other = FakeWorker(worker_id="w", behaviour=accept_and_hang), busy("other", accept_and_hang)
    async with running_gateway(worker, other, stall_timeout_s=0.3) as running:
        assert (await ask(running)).status_code == 504
        assert not other.submits


async def busiest(workers: list[WorkerProcess]) -> WorkerProcess:
    while True:
        for worker in workers:
            if (await worker.status())["running"]:
                return worker


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_streams_survive_their_decode_worker(tmp_path: Path, number: signal.Signals) -> None:
    """Killed, or told to end with less time than its streams need: as a pod that is evicted."""
    options = ("--timed-base-ms", "10", "--drain-timeout-s", "0.3")
    async with House(tmp_path, *TIMED, *options) as house:
        _, *decoders = await house.start_workers(("--role", "prefill"), ("--role", "decode"), ("--role", "decode"))
        await house.start_gateway()
        await house.until_ready(prefill=1, decode=2)
        prompts = [prompt_of(200, seed=seed) for seed in range(6)]
        answers = [Streamed() for _ in prompts]
        streams = [
            asyncio.create_task(house.stream(prompt, answer, max_tokens=150))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        await asyncio.gather(*(asyncio.wait_for(answer.first_text.wait(), 30) for answer in answers))
        dying = await busiest(decoders)
        dying.send_signal(number)
        await asyncio.gather(*streams)
        assert all(answer.complete for answer in answers), [answer.error for answer in answers]
        assert all(answer.events[-1]["usage"]["completion_tokens"] == 150 for answer in answers)
        undisturbed = await asyncio.gather(*(house.stream(prompt, max_tokens=150) for prompt in prompts))
        assert [answer.text for answer in undisturbed] == [answer.text for answer in answers]
        assert await house.gateway_metric("antiphon_gateway_moves_total") >= 1
        await house.until_gateway_is_at_rest()
