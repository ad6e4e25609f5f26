"""Overload at the gateway's door: who is let in, who is sent away for how long, and what nobody may do to others."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from antiphon_gateway.auth import ApiKeys, ApiKeysError, Caller
from antiphon_gateway.errors import ApiError
from antiphon_gateway.sessions import Sessions
from antiphon_gateway.wishes import Wishes, read_wishes
from antiphon_policy.admission import Priority
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import Connection, FakeWorker, accept_and_hang, generate
from tests.support.gateway import RunningGateway, eventually, running_gateway

BODY: dict[str, Any] = {"model": "test-model", "prompt": [7] * 64, "max_tokens": 2}


async def ask(
    running: RunningGateway, key: str = "", headers: dict[str, str] | None = None, **changes: Any
) -> httpx.Response:
    head = {**({"authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
    return await running.client.post("/v1/completions", json={**BODY, **changes}, headers=head)


async def refuse(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    connection.refuse(submit.ref, pb.REFUSAL_CAPACITY, "full")


async def end(running: RunningGateway, *requests: asyncio.Task[Any]) -> None:
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    await eventually(lambda: running.at_rest)


def busy_with(tokens: int, worker_id: str = "worker-1") -> FakeWorker:
    """It says again and again that it has so many prompt tokens to compute."""
    worker = FakeWorker(worker_id=worker_id)
    worker.queue.waiting_tokens = tokens
    return worker


# -- held here, not there


async def test_a_worker_with_enough_to_do_gets_nothing_until_it_has_room() -> None:
    """What waits, waits where its order and its worker can still change: here."""
    worker = busy_with(100_000)
    async with running_gateway(worker) as running:
        requests = [asyncio.create_task(ask(running)) for _ in range(4)]
        await eventually(lambda: running.gateway.dispatcher.waiting == 4)
        assert not worker.submits
        worker.queue.waiting_tokens = 0
        assert [response.status_code for response in await asyncio.gather(*requests)] == [200] * 4


async def test_figures_that_stand_still_hold_nothing_up_for_ever() -> None:
    """llm-d/llm-d-router#2547: a feed that froze at a busy moment, with an idle worker behind it. 2,000 tokens are a
    second of work; when that should be done, the next request is sent all the same."""
    worker = busy_with(2_000)
    async with running_gateway(worker) as running:
        assert (await ask(running)).status_code == 200


# -- bounds


async def test_two_thousand_at_once_are_served_queued_or_told_when_to_come_back() -> None:
    """vllm-project/production-stack#448: no crash and no open end; what is too much is 429 at once."""
    worker = FakeWorker(behaviour=accept_and_hang)

    async def some(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        await (accept_and_hang if worker.running <= 300 else refuse)(worker, connection, submit)

    worker.behaviour = some
    async with running_gateway(worker, queue_size=400) as running:
        requests = [asyncio.create_task(_head_of_answer(running)) for _ in range(2000)]
        dispatcher = running.gateway.dispatcher

        def settled() -> bool:
            answered = sum(request.done() for request in requests)
            return answered + worker.running + dispatcher.waiting == 2000

        await eventually(settled, timeout_s=60.0)
        heads = [request.result() for request in requests if request.done()]
        assert len(heads) >= 1200
        assert {head.split(b"\r\n")[0] for head in heads} == {b"HTTP/1.1 429 Too Many Requests"}
        assert all(re.search(rb"(?i)\r\nretry-after: [1-9]", head) for head in heads)
        assert dispatcher.waiting <= 400
        await end(running, *requests)


async def _head_of_answer(running: RunningGateway) -> bytes:
    """A connection of its own, as light as can be: two thousand of a client library's take longer than the gateway."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
    try:
        body = json.dumps(BODY).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        return await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.close()


async def test_the_queue_is_bounded_in_tokens_too_but_one_alone_may_wait() -> None:
    async with running_gateway(FakeWorker(behaviour=refuse), queue_tokens=1000) as running:
        long = asyncio.create_task(ask(running, prompt=[7] * 5000))
        await eventually(lambda: running.gateway.dispatcher.waiting == 1)
        response = await ask(running)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert not long.done()
        await end(running, long)


async def test_retry_after_comes_from_the_workers_own_step_models() -> None:
    """40,000 tokens wait; the half of them at 0.5 ms each and 2.1 ms a chunk of 512 takes 10 s, and up to half as much
    is added so that not all come back at once."""
    async with running_gateway(FakeWorker(behaviour=refuse), queue_size=4) as running:
        waiting = [asyncio.create_task(ask(running, prompt=[7] * 10_000)) for _ in range(4)]
        await eventually(lambda: running.gateway.dispatcher.waiting == 4)
        seconds = [int((await ask(running)).headers["retry-after"]) for _ in range(8)]
        assert all(10 <= value <= 16 for value in seconds), seconds
        await end(running, *waiting)


# -- tenants


async def test_a_tenant_that_fills_the_queue_does_not_keep_the_others_out() -> None:
    """The newest request of whoever takes most of the room makes way, not whoever comes last."""
    keys = {"k1": "flood", "k2": "other"}
    async with running_gateway(FakeWorker(behaviour=refuse), keys=keys, queue_size=6) as running:
        flood = [asyncio.create_task(ask(running, "k1")) for _ in range(6)]
        await eventually(lambda: running.gateway.dispatcher.waiting == 6)
        other = asyncio.create_task(ask(running, "k2"))
        await eventually(lambda: any(request.done() for request in flood))
        assert [request.result().status_code for request in flood if request.done()] == [429]
        assert not other.done()
        assert running.gateway.dispatcher.waiting == 6
        assert (await ask(running, "k1")).status_code == 429
        await end(running, other, *flood)


async def test_tenants_and_classes_are_served_by_their_shares() -> None:
    """One of each waits behind six of the flood: both are among the first that start, the high one first."""
    keys = {"k1": "flood", "k2": "other", "k3": Caller("paid", Priority.HIGH)}
    worker = FakeWorker(behaviour=refuse)
    async with running_gateway(worker, keys=keys) as running:
        requests = [asyncio.create_task(ask(running, "k1", prompt=[1] * 600)) for _ in range(6)]
        await eventually(lambda: running.gateway.dispatcher.waiting == 6)
        requests += [
            asyncio.create_task(ask(running, "k2", prompt=[2] * 600)),
            asyncio.create_task(ask(running, "k3", {"x-antiphon-priority": "high"}, prompt=[3] * 600)),
        ]
        await eventually(lambda: running.gateway.dispatcher.waiting == 8)
        worker.behaviour = generate
        worker.submits.clear()
        assert {response.status_code for response in await asyncio.gather(*requests)} == {200}
        # A refusal may still have been under way.
        order = [submit.prompt_token_ids[0] for submit in worker.submits][-8:]
        assert order.index(3) <= 1
        assert order.index(2) <= 3


# -- what clients may say


async def test_a_client_that_cannot_be_served_in_its_time_is_told_at_once() -> None:
    """100,000 tokens wait before it: that is 50 s. One that says nothing of its time waits."""
    async with running_gateway(FakeWorker(behaviour=refuse)) as running:
        first = asyncio.create_task(ask(running, prompt=[7] * 100_000))
        await eventually(lambda: running.gateway.dispatcher.waiting == 1)
        response = await ask(running, headers={"x-request-timeout-ms": "5000"})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "deadline_unreachable")
        assert int(response.headers["retry-after"]) >= 25
        patient = asyncio.create_task(ask(running))
        await eventually(lambda: running.gateway.dispatcher.waiting == 2)
        await end(running, first, patient)


async def test_a_client_waits_no_longer_than_it_said() -> None:
    async with running_gateway(FakeWorker(behaviour=refuse)) as running:
        response = await ask(running, headers={"x-request-timeout-ms": "200"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_timeout")
        assert "0.2 s" in response.json()["error"]["message"]
        await eventually(lambda: running.at_rest)


async def test_wishes_that_mean_nothing_are_refused_by_name() -> None:
    async with running_gateway(FakeWorker()) as running:
        for headers in ({"x-antiphon-priority": "urgent"}, {"x-request-timeout-ms": "-1"}):
            response = await ask(running, headers=headers)
            assert response.status_code == 400
            assert next(iter(headers)) in response.json()["error"]["message"]
        response = await ask(running, service_tier="gold")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "service_tier")
        assert (await ask(running, service_tier="flex", priority=3)).status_code == 200


async def test_a_session_returns_to_its_workers_among_equals() -> None:
    """Four equal workers: each request of a session goes where the one before went, others anywhere."""
    workers = [FakeWorker(worker_id=f"w{at}") for at in range(4)]
    async with running_gateway(*workers) as running:
        for _ in range(8):
            assert (await ask(running, headers={"x-session-id": "mine"})).status_code == 200
            await eventually(lambda: running.at_rest)
        assert sorted(len(worker.submits) for worker in workers) == [0, 0, 0, 8]


def wishes(**headers: str) -> Wishes:
    named = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    return read_wishes(lambda name: named.get(name, ""), Priority.HIGH)


def test_the_header_wins_over_the_tier_and_the_tier_over_the_number() -> None:
    assert wishes(x_antiphon_priority="low").granted("priority", -1) is Priority.LOW
    assert wishes().granted("priority", 1) is Priority.HIGH
    assert wishes().granted(None, 1) is Priority.LOW
    assert wishes().granted(None, -1) is Priority.HIGH
    assert wishes().granted(None, 0) is wishes().granted() is Priority.NORMAL


def test_nobody_gets_more_than_its_key_allows() -> None:
    assert Wishes(priority=Priority.HIGH).granted() is Priority.NORMAL
    assert Wishes(most=Priority.LOW).granted() is Priority.LOW


def test_a_session_id_that_is_too_long_is_none() -> None:
    assert wishes(x_session_id="s" * 128).session == "s" * 128
    assert wishes(x_session_id="s" * 129).session == ""


def test_a_timeout_is_a_whole_number_of_milliseconds() -> None:
    assert wishes(x_request_timeout_ms="1500").timeout_s == 1.5
    for wrong in ("0", "1.5", "-1", "soon", "١", "1" * 11):
        with pytest.raises(ApiError, match="x-request-timeout-ms"):
            wishes(x_request_timeout_ms=wrong)


def test_a_key_may_say_the_highest_class_of_its_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"k1": "plain", "k2": {"tenant": "paid", "priority": "high"}, "k3": {"tenant": "t"}}))
    keys = ApiKeys.load(str(file))
    assert keys.caller("Bearer k1") == Caller("plain", Priority.NORMAL)
    assert keys.caller("Bearer k2") == Caller("paid", Priority.HIGH)
    assert keys.caller("Bearer k3") == Caller("t", Priority.NORMAL)
    for wrong in ({"k": {"tenant": "t", "priority": "urgent"}}, {"k": {"tenant": ""}}, {"k": {"tenat": "t"}}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(ApiKeysError):
            ApiKeys.load(str(file))


def test_the_sessions_used_last_are_kept_and_tenants_never_meet() -> None:
    sessions = Sessions(limit=2)
    sessions.went("m", "a", "s", ("d1", "p1"))
    sessions.went("m", "b", "s", ("d2", ""))
    sessions.went("m", "a", "s", ("d3", "p1"))
    sessions.went("m", "a", "t", ("d4", "p1"))
    sessions.went("m", "a", "", ("d5", "p1"))
    assert len(sessions) == 2
    assert sessions.last("m", "a", "s") == ("d3", "p1")
    assert sessions.last("m", "b", "s") is None
    assert sessions.last("m", "a", "") is None
