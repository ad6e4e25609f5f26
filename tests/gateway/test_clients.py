"""Clients that go away or do not read, and what the socket is told."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvloop
from antiphon_gateway.chat import ChatRenderer
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import Behaviour, Connection, FakeWorker, accept_and_hang, endless
from tests.support.gateway import RunningGateway, eventually, running_gateway

CHAT: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10**6}
NUMBERED = 80


async def connect(
    running: RunningGateway, receive_buffer: int = 0
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = urlsplit(running.url)
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (url.hostname, url.port))
    return await asyncio.open_connection(sock=client, limit=1024)


def request_bytes(**changes: Any) -> bytes:
    body = json.dumps({**CHAT, **changes}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def refuse_for_want_of_room(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    connection.refuse(submit.ref, pb.REFUSAL_CAPACITY)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("behaviour", [accept_and_hang, endless, refuse_for_want_of_room])
async def test_a_client_that_goes_away_frees_everything(behaviour: Behaviour, stream: bool) -> None:
    """vllm-project/production-stack#1040, vllm-project/aibrix#1246: while queued, before the first token, and later,
    streamed or not; every gauge returns and it does not count as an error."""
    worker = FakeWorker(behaviour=behaviour)
    async with running_gateway(worker) as running:
        reader, writer = await connect(running)
        writer.write(request_bytes(stream=stream))
        if behaviour is refuse_for_want_of_room:
            await eventually(lambda: running.gateway.dispatcher.waiting == 1)
        else:
            await worker.until(lambda: worker.running == 1)
        if behaviour is endless and stream:
            await reader.readuntil(b"data: ")
        writer.close()
        await eventually(lambda: running.at_rest)
        await worker.until(lambda: worker.running == 0)
        assert running.metric("antiphon_gateway_cancelled_total") == 1
        assert running.metric("antiphon_gateway_requests_total") == 0


async def test_a_client_that_goes_away_with_a_second_request_in_the_pipe_frees_the_first() -> None:
    worker = FakeWorker(behaviour=accept_and_hang)
    async with running_gateway(worker) as running:
        _, writer = await connect(running)
        writer.write(request_bytes())
        await worker.until(lambda: worker.running == 1)
        writer.write(request_bytes())
        await writer.drain()
        # The second is in the gateway's hands when the connection is read no further.
        protocols = running.server.connections
        await eventually(lambda: any(protocol.pipeline for protocol in protocols))
        writer.close()
        await worker.until(lambda: worker.running == 0)
        await eventually(lambda: running.at_rest)


async def test_a_client_that_sends_half_a_body_and_leaves() -> None:
    async with running_gateway(FakeWorker()) as running:
        _, writer = await connect(running)
        writer.write(request_bytes()[:-10])
        await eventually(lambda: running.gateway.in_flight == 1)
        writer.close()
        await eventually(lambda: running.at_rest)


async def test_a_client_that_never_ends_its_body_is_answered_408() -> None:
    async with running_gateway(FakeWorker(), body_timeout_s=0.2) as running:
        reader, writer = await connect(running)
        writer.write(request_bytes()[:-10])
        assert b" 408 " in await reader.readline()
        writer.close()


async def test_a_slow_client_is_bounded_by_itself() -> None:
    """What it does not read is cut off, with an error; other streams on the same worker go on meanwhile."""
    worker = FakeWorker(behaviour=endless_big)
    async with running_gateway(worker, stream_buffer_steps=50) as running:
        reader, writer = await connect(running, receive_buffer=4096)
        writer.write(request_bytes(stream=True))
        await worker.until(lambda: len(worker.cancelled) == 1)
        worker.behaviour = ten_tokens
        other = await running.client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert other.text.endswith("data: [DONE]\n\n")
        assert running.metric("antiphon_gateway_slow_clients_total") == 1
        rest = await reader.read(-1) if reader.at_eof() else await _read_to_the_end(reader)
        assert b"client_too_slow" in rest
        assert b"[DONE]" not in rest
        writer.close()
        await eventually(lambda: running.at_rest)


async def test_a_client_that_takes_nothing_is_disconnected() -> None:
    worker = FakeWorker(behaviour=endless_big)
    async with running_gateway(worker, stream_buffer_steps=20, client_timeout_s=0.2) as running:
        _, writer = await connect(running, receive_buffer=4096)
        writer.transport.pause_reading()
        writer.write(request_bytes(stream=True))
        await worker.until(lambda: len(worker.submits) == 1)
        await eventually(lambda: running.at_rest)
        assert worker.running == 0 or await worker.until(lambda: worker.running == 0) is None
        writer.close()


async def _read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while b"0\r\n\r\n" not in b"".join(parts[-2:])[-200:]:
        part = await asyncio.wait_for(reader.read(65536), 10)
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


async def endless_big(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    connection.accept(submit.ref)
    while True:
        connection.step(submit.ref, token_ids=[97], text="a" * 20_000)
        await asyncio.sleep(0.001)


async def ten_tokens(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    connection.accept(submit.ref)
    for position in range(10):
        connection.step(submit.ref, token_ids=[97], text="a", finish=pb.FINISH_STOP if position == 9 else 0)


async def numbered(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    """More than the sockets take."""
    connection.accept(submit.ref)
    for number in range(NUMBERED):
        finish = pb.FINISH_STOP if number == NUMBERED - 1 else pb.FINISH_NONE
        connection.step(submit.ref, token_ids=[97], text=f"<{number}>" + "a" * 100_000, finish=finish)
        await asyncio.sleep(0)


async def test_a_client_that_reads_late_gets_everything_in_order() -> None:
    """What is sent on as it comes, and what had to be collected meanwhile."""
    worker = FakeWorker(behaviour=numbered)
    async with running_gateway(worker, stream_buffer_steps=NUMBERED) as running:
        reader, writer = await connect(running, receive_buffer=65_536)
        writer.write(request_bytes(stream=True))
        got = bytearray(await reader.read(65536))
        await eventually(lambda: any(flight.writing_since for flight in running.gateway.generation.flights))
        while b"[DONE]" not in got[-100:]:
            got += await asyncio.wait_for(reader.read(65536), 10)
        assert [int(number) for number in re.findall(rb"<(\d+)>", got)] == list(range(NUMBERED))
        writer.close()
        await eventually(lambda: running.at_rest)


async def test_a_step_that_cannot_be_told_ends_its_own_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the stream to the worker, which carries everybody's tokens."""
    render = ChatRenderer.take

    def take(self: ChatRenderer, choice: Any, step: pb.RequestStep) -> bytes:
        if step.text == "broken":
            raise RuntimeError("a fault of a renderer")
        return render(self, choice, step)

    monkeypatch.setattr(ChatRenderer, "take", take)
    broken = asyncio.Event()

    async def answers(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        connection.step(submit.ref, token_ids=[97], text="first")
        if submit.sampling.max_tokens == 7:
            await broken.wait()
            connection.step(submit.ref, token_ids=[97], text="broken")
            await asyncio.sleep(10)
        else:
            await worker.until(lambda: len(worker.cancelled) == 1)
            connection.step(submit.ref, token_ids=[97], text="last", finish=pb.FINISH_STOP)

    worker = FakeWorker(behaviour=answers)
    async with running_gateway(worker) as running:
        post = running.client.post
        bad = asyncio.create_task(post("/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 7}))
        good = asyncio.create_task(post("/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 8}))
        await worker.until(lambda: len(worker.submits) == 2)
        broken.set()
        assert (await good).text.endswith("data: [DONE]\n\n")
        last = (await bad).text.strip().rpartition("data: ")[2]
        assert json.loads(last)["error"]["type"] == "server_error"
        assert running.metric("antiphon_gateway_workers_lost_total") == 0
        await eventually(lambda: running.at_rest)


async def test_the_first_event_leaves_before_the_last_token_exists() -> None:
    """vllm-project/router#113, sgl-project/sglang#37961: nothing is held back until the answer is whole."""
    gate = asyncio.Event()

    async def gated(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        connection.step(submit.ref, token_ids=[97], text="first")
        await gate.wait()
        connection.step(submit.ref, token_ids=[97], text="last", finish=pb.FINISH_STOP)

    async with running_gateway(FakeWorker(behaviour=gated)) as running:
        reader, writer = await connect(running)
        writer.write(request_bytes(stream=True))
        await asyncio.wait_for(reader.readuntil(b'"content":"first"'), 10)
        gate.set()
        await asyncio.wait_for(reader.readuntil(b"[DONE]"), 10)
        writer.close()


def test_client_sockets_do_not_delay_small_packets() -> None:
    """Without TCP_NODELAY a stream of small events stalls for 40 ms at a time. On the loop that the process uses."""

    async def check() -> None:
        async with running_gateway(FakeWorker(behaviour=endless)) as running:
            reader, writer = await connect(running)
            writer.write(request_bytes(stream=True))
            await reader.readuntil(b"data: ")
            sockets = [protocol.transport.get_extra_info("socket") for protocol in running.server.connections]
            assert sockets
            assert all(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in sockets)
            writer.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(check())


async def test_the_head_of_a_request_is_bounded() -> None:
    async with running_gateway(FakeWorker()) as running:
        reader, writer = await connect(running)
        writer.write(b"GET /health HTTP/1.1\r\nx: " + b"y" * 100_000)
        assert b" 400 " in await reader.readline()
        writer.close()
        # Requests on one connection are counted one by one.
        reader, writer = await connect(running)
        for _ in range(3):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nx: " + b"y" * 50_000 + b"\r\n\r\n")
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b'{"status":"ok"}')
        writer.close()
