"""HTTP/1.1 as the gateway speaks it: what raw bytes on a socket are answered with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from antiphon_gateway import http_server
from antiphon_gateway.http import JSON_TYPE, UNASKED_BODY_BYTES, AnswerInvalid, Request
from antiphon_gateway.http_server import HttpServer
from antiphon_gateway.server import listen

from tests.support.gateway import eventually

Handler = Callable[[Request], Awaitable[None]]


async def plain(request: Request) -> None:
    """Says what it was asked."""
    body = await request.body(1000, 5.0) if request.method == "POST" else b""
    said = f"{request.method} {request.path} {len(body)}".encode()
    await request.respond(200, said, JSON_TYPE)


class Talk:
    def __init__(self, server: HttpServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def until(self, end: bytes) -> bytes:
        return await asyncio.wait_for(self._reader.readuntil(end), 10)

    async def rest(self) -> bytes:
        """What comes until the connection is closed."""
        return await asyncio.wait_for(self._reader.read(), 10)

    def close(self) -> None:
        self._writer.close()


@contextlib.asynccontextmanager
async def talk(handler: Handler = plain) -> AsyncIterator[Talk]:
    server = HttpServer(handler, last_words_s=1.0)
    listener = listen("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield Talk(server, reader, writer)
    finally:
        writer.close()
        server.stop()
        await serving
        listener.close()


async def test_requests_on_one_connection_are_answered_in_turn() -> None:
    """Also when they come in one packet, or byte by byte."""
    requests = b"GET /a HTTP/1.1\r\n\r\nPOST /b HTTP/1.1\r\ncontent-length: 3\r\n\r\nxyzGET /c%20d?e HTTP/1.1\r\n\r\n"
    async with talk() as connection:
        connection.send(requests)
        await connection.until(b"GET /a 0")
        await connection.until(b"POST /b 3")
        await connection.until(b"GET /c d 0")
        for byte in requests:
            connection.send(bytes([byte]))
            await asyncio.sleep(0)
        await connection.until(b"GET /c d 0")


async def test_more_requests_than_are_read_ahead_are_all_answered() -> None:
    async with talk() as connection:
        connection.send(b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % number for number in range(100)))
        for number in range(100):
            await connection.until(b"GET /%d 0" % number)


async def test_a_client_that_leaves_is_noticed_though_its_body_had_come_before_anybody_asked_for_it() -> None:
    """ai-dynamo/dynamo#13691: a body that is longer than what is read ahead stops the reading, also with its last
    byte; and who does not read does not see the end of the connection."""
    asked, left = asyncio.Event(), asyncio.Event()

    async def late(request: Request) -> None:
        await eventually(lambda: request._body_ended)
        assert len(await request.body(1_000_000, 5.0)) == UNASKED_BODY_BYTES + 1
        request.on_gone = left.set
        asked.set()
        await left.wait()

    async with talk(late) as client:
        size = UNASKED_BODY_BYTES + 1
        client.send(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
        await asyncio.wait_for(asked.wait(), 10)
        client.close()
        await asyncio.wait_for(left.wait(), 10)


async def test_an_answer_has_a_date_and_no_more_than_asked_for() -> None:
    async with talk() as connection:
        connection.send(b"HEAD /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\n")
        head = await connection.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\ndate: " in head
        assert b"\r\ncontent-length: 9\r\n" in head
        assert (await connection.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        await connection.until(b"GET /b 0")


@pytest.mark.parametrize(
    "head", [b"GET /a HTTP/1.0\r\n\r\n", b"GET /a HTTP/1.1\r\nConnection: close\r\n\r\n"], ids=["1.0", "close"]
)
async def test_a_connection_that_is_not_kept_is_closed_after_the_answer(head: bytes) -> None:
    async with talk() as connection:
        connection.send(head)
        answer = await connection.rest()
        assert b"\r\nconnection: close\r\n" in answer
        assert answer.endswith(b"GET /a 0")


async def test_pieces_of_an_answer_are_chunks_and_for_old_clients_the_bare_bytes() -> None:
    async def pieces(request: Request) -> None:
        request.start(200, ())
        await request.send(b"one", last=False)
        await request.send(b"", last=False)
        await request.send(b"two!", last=True)

    async with talk(pieces) as connection:
        connection.send(b"GET / HTTP/1.1\r\n\r\n")
        answer = await connection.until(b"\r\n0\r\n\r\n")
        assert b"transfer-encoding: chunked" in answer
        assert answer.endswith(b"\r\n\r\n3\r\none\r\n4\r\ntwo!\r\n0\r\n\r\n")
        connection.send(b"GET / HTTP/1.0\r\n\r\n")
        answer = await connection.rest()
        assert b"chunked" not in answer
        assert answer.endswith(b"\r\n\r\nonetwo!")


async def test_a_client_that_asks_before_it_sends_its_body_is_told_to_go_on() -> None:
    async with talk() as connection:
        connection.send(b"POST /a HTTP/1.1\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n")
        assert await connection.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.send(b"hi")
        await connection.until(b"POST /a 2")


async def test_a_chunked_body_is_put_together() -> None:
    async with talk() as connection:
        connection.send(b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        await connection.until(b"POST /a 5")


@pytest.mark.parametrize(
    "nonsense",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n",
        b"GET / HTTP/1.1\r\na b: c\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_answered_400_and_closed(nonsense: bytes) -> None:
    """Two lengths of one body are the old trick by which a second request hides in the first."""
    async with talk() as connection:
        connection.send(nonsense)
        answer = await connection.rest()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b" 200 " not in answer


async def test_nonsense_behind_a_request_never_gets_into_its_answer() -> None:
    gone = asyncio.Event()

    async def slow(request: Request) -> None:
        request.on_gone = gone.set
        request.start(200, ())
        await request.send(b"begun", last=False)
        await gone.wait()

    async with talk(slow) as connection:
        connection.send(b"GET / HTTP/1.1\r\n\r\n")
        await connection.until(b"begun\r\n")
        connection.send(b"nonsense\r\n\r\n")
        assert await connection.rest() == b""
        await asyncio.wait_for(gone.wait(), 10)


async def test_another_protocol_is_not_spoken_and_the_request_is_answered() -> None:
    async with talk() as connection:
        connection.send(b"GET /a HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        answer = await connection.rest()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"GET /a 0")


async def test_a_line_break_in_a_header_of_an_answer_is_a_fault_and_never_sent() -> None:
    faults: list[Exception] = []

    async def split(request: Request) -> None:
        try:
            await request.respond(200, b"", (b"x-who", b"a\r\nset-cookie: b"))
        except AnswerInvalid as error:
            faults.append(error)

    async with talk(split) as connection:
        connection.send(b"GET / HTTP/1.1\r\n\r\n")
        assert await connection.rest() == b""
        assert faults


async def test_a_connection_without_a_request_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a head of one does not count."""
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(http_server, "_TICK_S", 0.02)
    async with talk() as connection:
        connection.send(b"GET /a HTTP/1.1\r\n\r\nGET /b HTT")
        await connection.until(b"GET /a 0")
        with contextlib.suppress(ConnectionResetError):
            assert await connection.rest() == b""
        assert not connection.server.connections


async def test_stopping_lets_answers_end_and_closes_what_is_idle() -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def gated(request: Request) -> None:
        begun.set()
        await go.wait()
        await request.respond(200, b"all of it")

    async with talk(gated) as connection:
        connection.send(b"GET / HTTP/1.1\r\n\r\n")
        await begun.wait()
        connection.server.stop()
        await asyncio.sleep(0)
        go.set()
        answer = await connection.rest()
        assert b"connection: close" in answer
        assert answer.endswith(b"all of it")
