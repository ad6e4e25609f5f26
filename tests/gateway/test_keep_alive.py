"""Streams in which nothing is said for a while: comments, what clients make of them, and failures behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest
from antiphon_gateway import app, errors
from antiphon_gateway.http import Request
from antiphon_gateway.keep_alive import COMMENT, PING, KeepAlive
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import Connection, FakeWorker, generate, tokens
from tests.support.gateway import RunningGateway, eventually, running_gateway
from tests.support.openai_cases import parse_stream

MESSAGES: Any = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
}
QUICK: dict[str, Any] = {"keep_alive_s": 0.05, "keep_alive_first_s": 0.1}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_SWEEP_S", 0.02)


class Slow:
    """A worker's behaviour: silent before the first token and after the second, each until it is told to go on."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.fails = ""

    async def __call__(self, worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        await self.first.wait()
        if not self.fails:
            await tokens(connection, submit, b"ab", finish=False)
            await self.second.wait()
        if self.fails:
            connection.step(submit.ref, finish=pb.FINISH_ERROR, error=self.fails)
            return
        connection.step(submit.ref, token_ids=[65], text="c")
        connection.step(submit.ref, token_ids=[66], text="d", finish=pb.FINISH_STOP)


async def until(pieces: AsyncIterator[bytes], said: bytes, times: int = 1) -> bytes:
    """What comes until it was said so often."""
    got = b""
    async with asyncio.timeout(20):
        async for piece in pieces:
            got += piece
            if got.count(said) >= times:
                return got
    raise AssertionError(got)


def stream(running: RunningGateway, path: str) -> Any:
    return running.client.stream("POST", path, json={"model": "test-model", "stream": True, **BODIES[path]})


async def some_sweeps(worker: FakeWorker) -> None:
    """A while in which the gateway looks at its streams some ten times."""
    heard = worker.heartbeats
    await worker.until(lambda: worker.heartbeats > heard + 2)


@pytest.mark.parametrize("path", BODIES)
async def test_a_silent_stream_is_kept_alive_before_its_first_token_and_between_two(path: str) -> None:
    slow = Slow()
    async with running_gateway(FakeWorker(behaviour=slow), **QUICK) as running, stream(running, path) as response:
        assert response.status_code == 200
        pieces = response.aiter_bytes()
        before = await until(pieces, COMMENT, 2)
        assert before.replace(COMMENT, b"") == b""
        slow.first.set()
        between = await until(pieces, PING if path == "/v1/messages" else COMMENT, 3)
        assert path == "/v1/messages" or PING not in between
        slow.second.set()
        rest = b"".join([piece async for piece in pieces])
        raw = between + rest
        if path in ("/v1/chat/completions", "/v1/completions"):
            told = parse_stream(raw.replace(COMMENT, b""))
            assert told.done == 1
            texts = [c["delta"].get("content", "") if "delta" in c else c["text"] for c in told.choices(0)]
            assert "".join(texts) == "abcd"
        assert response.headers["content-type"].startswith("text/event-stream")
    await eventually(lambda: running.at_rest)


@pytest.mark.parametrize("path", BODIES)
async def test_a_failure_after_the_first_comment_is_an_event_and_the_end(path: str) -> None:
    slow = Slow()
    slow.fails = "out of luck"
    async with running_gateway(FakeWorker(behaviour=slow), **QUICK) as running:
        async with stream(running, path) as response:
            pieces = response.aiter_bytes()
            await until(pieces, COMMENT)
            slow.first.set()
            raw = b"".join([piece async for piece in pieces]).replace(COMMENT, b"")
        start = b'event: error\ndata: {"type":"error","error":{' if path == "/v1/messages" else b'data: {"error":{'
        assert raw.startswith(start)
        assert b"out of luck" in raw
        assert raw.count(b"\n\n") == 1
        assert raw.endswith(b"\n\n")
        assert 'status="503"' in running.gateway.metrics.page().decode()
        await eventually(lambda: running.at_rest)


@pytest.mark.parametrize("options", [{"keep_alive_s": 0.05, "keep_alive_first_s": 0.0}, {"keep_alive_s": 0.0}])
async def test_until_then_a_failure_has_its_status_and_zero_turns_it_off(options: dict[str, Any]) -> None:
    slow = Slow()
    slow.fails = "out of luck"
    worker = FakeWorker(behaviour=slow)
    async with running_gateway(worker, **options) as running:
        body = {"model": "test-model", "stream": True, **BODIES["/v1/completions"]}
        pending = asyncio.create_task(running.client.post("/v1/completions", json=body))
        await worker.until(lambda: worker.running == 1)
        await some_sweeps(worker)
        slow.first.set()
        response = await pending
        assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_failed")
        assert response.headers["retry-after"]


async def test_a_request_that_was_only_kept_alive_may_still_go_elsewhere() -> None:
    hanging, other = FakeWorker(behaviour=Slow()), FakeWorker(worker_id="w2", behaviour=generate, role=pb.ROLE_PREFILL)
    async with running_gateway(hanging, other, **QUICK) as running, stream(running, "/v1/completions") as response:
        pieces = response.aiter_bytes()
        await until(pieces, COMMENT)
        third = await FakeWorker(worker_id="w3").start()
        try:
            running.gateway.fleet._static = (*running.gateway.fleet._static, third.address)
            running.gateway.fleet._reconcile()
            await eventually(lambda: len(running.gateway.fleet.workers()) == 3)
            await hanging.stop()
            raw = b"".join([piece async for piece in pieces])
            assert parse_stream(raw.replace(COMMENT, b"")).done == 1
        finally:
            await third.stop()


async def test_answers_that_are_sent_whole_wait_in_silence() -> None:
    slow = Slow()
    worker = FakeWorker(behaviour=slow)
    async with running_gateway(worker, **QUICK) as running:
        body = {"model": "test-model", **BODIES["/v1/completions"]}
        pending = asyncio.create_task(running.client.post("/v1/completions", json=body))
        await worker.until(lambda: worker.running == 1)
        await some_sweeps(worker)
        slow.first.set()
        slow.second.set()
        assert (await pending).json()["choices"][0]["text"] == "abcd"


async def chat_text(url: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chunks = await client.chat.completions.create(model="test-model", messages=MESSAGES, max_tokens=4, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def response_text(url: str) -> str:
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model="test-model", input="hello", max_output_tokens=4) as events,
    ):
        return (await events.get_final_response()).output_text


async def message_text(url: str) -> str:
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
        client.messages.stream(model="test-model", messages=MESSAGES, max_tokens=4) as message,
    ):
        return await message.get_final_text()


@pytest.mark.parametrize("ask", [chat_text, response_text, message_text])
async def test_clients_are_not_disturbed(ask: Callable[[str], Awaitable[str]]) -> None:
    slow = Slow()
    worker = FakeWorker(behaviour=slow)
    async with running_gateway(worker, **QUICK) as running:
        asking = asyncio.create_task(ask(running.url))
        await worker.until(lambda: worker.running == 1)
        for silence in (slow.first, slow.second):
            await some_sweeps(worker)
            silence.set()
        assert await asking == "abcd"
        slow.first.clear()
        slow.fails = "out of luck"
        asking = asyncio.create_task(ask(running.url))
        await eventually(lambda: any(request.started for request in running.gateway.generation.flights.values()))
        slow.first.set()
        with pytest.raises((openai.APIError, anthropic.APIStatusError), match="out of luck"):
            await asking


class Wire:
    """Where a request is answered: what is written, and no time."""

    date_line = b""
    write_paused = False

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def answer_ended(self, request: Request) -> None:
        raise AssertionError


async def test_silence_counts_from_what_was_written_last_and_never_while_the_client_takes_nothing() -> None:
    wire = Wire()
    request = Request(wire, "POST", "/v1/completions", {})  # type: ignore[arg-type]  # a double
    keeper = KeepAlive(15.0, 45.0)

    def look(now: float) -> int:
        keeper.look(request, now, 100.0, begun=True)
        return len(wire.written)

    assert [look(now) for now in (101.0, 144.0)] == [0, 0]
    assert look(145.0) == 1
    assert wire.written[0].startswith(b"HTTP/1.1 200")
    assert wire.written[0].endswith(b"\r\n" + COMMENT + b"\r\n")
    assert [look(now) for now in (159.0, 160.0, 161.0)] == [1, 2, 2]
    request.push(b"x")
    assert [look(now) for now in (174.0, 188.0, 189.0)] == [3, 3, 4]
    wire.write_paused = True
    assert look(300.0) == 4
    wire.write_paused = False
    assert look(301.0) == 5
    request.gone = True
    assert look(400.0) == 5


async def test_no_stream_has_a_timer_of_its_own() -> None:
    async with running_gateway(FakeWorker(behaviour=Slow()), **QUICK) as running:
        limits = httpx.Limits(max_connections=60)
        async with httpx.AsyncClient(base_url=running.url, timeout=None, limits=limits, trust_env=False) as client:
            loop: Any = asyncio.get_running_loop()
            before = len(loop._scheduled)
            body = {"model": "test-model", "stream": True, **BODIES["/v1/completions"]}
            waiting = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(50)]
            await eventually(
                lambda: sum(request.started for request in running.gateway.generation.flights.values()) == 50
            )
            # Those of connecting and of bodies have just ended.
            await eventually(lambda: len(loop._scheduled) - before < 25)
            running.gateway.generation.end_all()
            answers = await asyncio.gather(*waiting)
        assert all(errors.draining().message in answer.text for answer in answers)
        await eventually(lambda: running.at_rest)
