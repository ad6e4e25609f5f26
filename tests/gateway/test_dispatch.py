"""The waiting queue and what becomes of refusals, failures and bursts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import Behaviour, Connection, FakeWorker, accept_and_hang, generate
from tests.support.gateway import RunningGateway, eventually, running_gateway

CHAT: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


async def chat(running: RunningGateway, **changes: Any) -> httpx.Response:
    return await running.client.post("/v1/chat/completions", json={**CHAT, **changes})


def refusing(reason: pb.RefusalReason.ValueType, times: int = 10**9) -> Behaviour:
    left = [times]

    async def behaviour(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        if left[0] > 0:
            left[0] -= 1
            connection.refuse(submit.ref, reason, "said no")
        else:
            await generate(worker, connection, submit)

    return behaviour


def failing_after(tokens: int) -> Behaviour:
    async def behaviour(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        for _ in range(tokens):
            connection.step(submit.ref, token_ids=[64], text="a")
        connection.step(submit.ref, finish=pb.FINISH_ERROR, error="out of luck")

    return behaviour


async def test_a_worker_without_room_is_asked_again_when_its_load_has_changed() -> None:
    worker = FakeWorker(behaviour=refusing(pb.REFUSAL_CAPACITY, times=2))
    async with running_gateway(worker) as running:
        assert (await chat(running)).status_code == 200
        assert len(worker.submits) == 3
        assert len({submit.request_id for submit in worker.submits}) == 3


async def test_a_request_goes_to_the_worker_that_has_room() -> None:
    full = FakeWorker(worker_id="full", behaviour=refusing(pb.REFUSAL_CAPACITY))
    free = FakeWorker(worker_id="free")
    free.queue.waiting_tokens = 400
    async with running_gateway(full, free) as running:
        assert (await chat(running)).status_code == 200
        assert len(full.submits) == len(free.submits) == 1


async def test_draining_and_changed_workers_are_passed_over() -> None:
    for reason in (pb.REFUSAL_DRAINING, pb.REFUSAL_WRONG_ROLE):
        leaving = FakeWorker(worker_id="leaving", behaviour=refusing(reason))
        staying = FakeWorker(worker_id="staying")
        staying.queue.waiting_tokens = 400
        async with running_gateway(leaving, staying) as running:
            assert (await chat(running)).status_code == 200
            assert len(leaving.submits) == 1


async def test_a_worker_that_says_it_drains_gets_nothing() -> None:
    draining = FakeWorker(worker_id="draining")
    draining.queue.draining = True
    async with running_gateway(draining) as running:
        assert (await chat(running)).status_code == 503
        assert not draining.submits
        assert (await running.client.get("/ready")).status_code == 503


async def test_what_no_worker_will_take_is_the_clients_fault_and_is_not_walked_through_the_fleet() -> None:
    """vllm-project/vllm#17248: a poison request must not visit every worker."""
    workers = [FakeWorker(worker_id=f"w{index}", behaviour=refusing(pb.REFUSAL_INVALID)) for index in range(3)]
    async with running_gateway(*workers) as running:
        response = await chat(running)
        assert response.status_code == 400
        assert "said no" in response.json()["error"]["message"]
        assert sum(len(worker.submits) for worker in workers) == 1


async def test_a_full_queue_is_429_and_the_others_are_served() -> None:
    """vllm-project/production-stack#448: overload is answered, not suffered."""
    worker = FakeWorker(behaviour=refusing(pb.REFUSAL_CAPACITY))
    async with running_gateway(worker, queue_size=2) as running:
        waiting = [asyncio.create_task(chat(running)) for _ in range(2)]
        await eventually(lambda: running.gateway.dispatcher.waiting == 2 and worker.running == 0)
        running.gateway.dispatcher._loads[next(iter(running.gateway.dispatcher._loads))].full_since = float("inf")
        response = await chat(running)
        assert response.status_code == 429
        assert response.headers["retry-after"]
        assert response.json()["error"]["code"] == "queue_full"
        worker.behaviour = generate
        running.gateway.dispatcher._loads[next(iter(running.gateway.dispatcher._loads))].full_since = 0.0
        assert [response.status_code for response in await asyncio.gather(*waiting)] == [200, 200]
        await eventually(lambda: running.at_rest)


async def test_waiting_has_a_deadline() -> None:
    worker = FakeWorker(behaviour=refusing(pb.REFUSAL_CAPACITY))
    async with running_gateway(worker, queue_timeout_s=0.3) as running:
        response = await chat(running)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_timeout")
        assert response.headers["retry-after"]
        await eventually(lambda: running.at_rest)


async def test_a_failure_before_the_first_token_is_tried_elsewhere() -> None:
    bad = FakeWorker(worker_id="bad", behaviour=failing_after(0))
    good = FakeWorker(worker_id="good")
    good.queue.waiting_tokens = 400
    async with running_gateway(bad, good) as running:
        for stream in (False, True):
            assert (await chat(running, stream=stream)).status_code == 200
        assert len(bad.submits) == 2
        assert [submit.sampling.seed for submit in bad.submits] == [submit.sampling.seed for submit in good.submits]


async def test_a_failure_before_the_first_token_with_nobody_else_is_retryable() -> None:
    worker = FakeWorker(behaviour=failing_after(0))
    async with running_gateway(worker) as running:
        response = await chat(running, stream=True)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert "out of luck" in response.json()["error"]["message"]
        assert len(worker.submits) == 1


async def test_a_worker_that_dies_before_the_first_token_is_replaced() -> None:
    async def die(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        connection.close()

    dying = FakeWorker(worker_id="dying", behaviour=die)
    other = FakeWorker(worker_id="other")
    other.queue.waiting_tokens = 400
    async with running_gateway(dying, other) as running:
        assert (await chat(running)).status_code == 200
        assert len(other.submits) == 1


async def test_a_failure_in_mid_stream_ends_with_an_error_event_and_no_done() -> None:
    for behaviour in (failing_after(2), _dying_after_two):
        async with running_gateway(FakeWorker(behaviour=behaviour)) as running:
            response = await chat(running, stream=True)
            assert response.status_code == 200
            *chunks, last = response.text.rstrip("\n").split("\n\n")
            assert "[DONE]" not in response.text
            assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
            text = [json.loads(chunk.removeprefix("data: "))["choices"][0]["delta"].get("content") for chunk in chunks]
            assert "".join(part or "" for part in text) == "aa"
            await eventually(lambda running=running: running.at_rest)  # type: ignore[misc]


async def _dying_after_two(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    connection.accept(submit.ref)
    connection.step(submit.ref, token_ids=[64], text="a")
    connection.step(submit.ref, token_ids=[64], text="a")
    connection.close()


async def test_a_failure_in_the_middle_of_an_unstreamed_answer_has_a_status() -> None:
    """sgl-project/sglang#9726: the failing leg's status goes to the client, at once."""
    async with running_gateway(FakeWorker(behaviour=failing_after(2))) as running:
        response = await chat(running)
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "worker_failed"


async def test_one_choice_that_fails_ends_its_siblings() -> None:
    async def behaviour(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        if submit.sampling.choice == 1:
            await failing_after(1)(worker, connection, submit)
        else:
            await accept_and_hang(worker, connection, submit)

    worker = FakeWorker(behaviour=behaviour)
    async with running_gateway(worker) as running:
        assert (await chat(running, n=3)).status_code == 502
        await worker.until(lambda: worker.running == 0)
        assert len(worker.cancelled) == 2


async def test_a_burst_spreads_over_equal_workers() -> None:
    """vllm-project/router#178, llm-d/llm-d-router#298: each pick counts the picks before it, whatever was polled."""
    workers = [FakeWorker(worker_id=f"w{index}", behaviour=accept_and_hang, heartbeat_ms=300) for index in range(4)]
    async with running_gateway(*workers, lost_after_ms=3000) as running:
        long = [{"role": "user", "content": "x" * 2000}]
        requests = [asyncio.create_task(chat(running, messages=long)) for _ in range(16)]
        await eventually(lambda: sum(worker.running for worker in workers) == 16)
        counts = Counter({worker.worker_id: worker.running for worker in workers})
        assert max(counts.values()) <= 6, counts
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await eventually(lambda: running.at_rest)


async def test_the_prompt_is_computed_by_a_prefill_worker_where_there_is_one() -> None:
    decode = FakeWorker(worker_id="d", role=pb.ROLE_DECODE)
    prefill = FakeWorker(worker_id="p", role=pb.ROLE_PREFILL)
    async with running_gateway(decode, prefill) as running:
        assert (await chat(running, messages=[{"role": "user", "content": "x" * 4000}])).status_code == 200
        assert not prefill.submits
        assert [peer.worker_id for peer in decode.submits[0].prefill] == ["p"]
        assert decode.submits[0].prefill[0].incarnation == "p/1"
        assert decode.submits[0].prefill[0].address == prefill.address


async def test_prefill_workers_alone_serve_nothing() -> None:
    async with running_gateway(FakeWorker(role=pb.ROLE_PREFILL)) as running:
        assert (await chat(running)).status_code == 503
        assert (await running.client.get("/ready")).status_code == 503


async def test_a_request_that_nothing_comes_for_is_ended() -> None:
    worker = FakeWorker(behaviour=accept_and_hang)
    async with running_gateway(worker, stall_timeout_s=0.3) as running:
        response = await chat(running)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "stalled")
        await worker.until(lambda: worker.running == 0)
