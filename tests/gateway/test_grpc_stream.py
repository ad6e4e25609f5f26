"""The gateway's own end of a gRPC call, against grpc's server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from antiphon_gateway.grpc_stream import GrpcStream

PATH = "/test.Service/Call"
Behaviour = Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour

    def service(self, details: Any) -> Any:
        if details.method != PATH:
            return None
        return grpc.stream_stream_rpc_method_handler(self._behaviour)


class Received:
    """Messages as they come, and waiting for so many of them."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self._changed = asyncio.Event()

    def __call__(self, message: bytes) -> None:
        self.messages.append(message)
        self._changed.set()

    async def count(self, wanted: int) -> list[bytes]:
        async with asyncio.timeout(20):
            while len(self.messages) < wanted:
                self._changed.clear()
                await self._changed.wait()
        return self.messages


@contextlib.asynccontextmanager
async def called(behaviour: Behaviour, path: str = PATH) -> AsyncIterator[tuple[GrpcStream, Received]]:
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)))
    server.add_generic_rpc_handlers((_Handler(behaviour),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    received = Received()
    stream = await GrpcStream.open(f"127.0.0.1:{port}", path, received)
    try:
        yield stream, received
    finally:
        stream.close()
        await server.stop(None)


async def echo(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


async def test_messages_of_all_sizes_go_both_ways_in_order() -> None:
    """From empty ones to those of many frames, and in all more than any window."""
    sizes = [0, 1, 16_379, 16_384, 70_000, 3_000_000, *range(1500), 9_000_000, 5, 9_000_000]
    sent = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    async with called(echo) as (stream, received):
        for message in sent:
            stream.send(message)
        assert await received.count(len(sent)) == sent
        assert not stream.unsent_bytes
        assert not stream.closed.done()


async def test_what_the_other_end_has_no_room_for_is_kept_until_it_has() -> None:
    go = asyncio.Event()

    async def late(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"hello"
        await go.wait()
        async for message in messages:
            yield message[:1]

    async with called(late) as (stream, received):
        await received.count(1)
        for number in range(200):
            stream.send(bytes([number]) * 100_000)
        assert stream.unsent_bytes
        go.set()
        assert await received.count(201) == [b"hello", *(bytes([number]) for number in range(200))]


async def unavailable(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    yield b"one"
    await context.abort(grpc.StatusCode.UNAVAILABLE, "caf\u00e9 closed: 100 %")


async def ended(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    yield b"one"


async def faulty(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    raise RuntimeError("boom")
    yield b""


@pytest.mark.parametrize(
    ("behaviour", "path", "why"),
    [
        (unavailable, PATH, "UNAVAILABLE: caf\u00e9 closed: 100 %"),
        (ended, PATH, "the worker ended the stream"),
        (faulty, PATH, "UNKNOWN: "),
        (echo, "/test.Service/Other", "UNIMPLEMENTED: "),
    ],
)
async def test_how_the_call_ended_is_told(behaviour: Behaviour, path: str, why: str) -> None:
    async with called(behaviour, path) as (stream, _):
        assert (await asyncio.wait_for(stream.closed, 10)).startswith(why)
        stream.send(b"nobody is there, and nothing happens")


async def test_closing_cancels_the_call_at_the_other_end() -> None:
    cancelled = asyncio.Event()

    async def waiting(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"one"
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with called(waiting) as (stream, received):
        await received.count(1)
        stream.close()
        await asyncio.wait_for(cancelled.wait(), 10)
        assert stream.closed.result() == "closed by this gateway"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it does not speak gRPC"),
        (b"\x00\x00\x05\x00\x00\x00\x00\x00\x01\x01\x00\x00\x00\x00", "it does not speak gRPC: a message of 0 bytes"),
        (
            b"\x00\x00\x05\x00\x00\x00\x00\x00\x01\x00\xff\xff\xff\xff",
            "it does not speak gRPC: a message of 4294967295",
        ),
        (b"\x00\x00\x03\x08\x00\x00\x00\x00\x01\x00\x00\x00", "it does not speak gRPC"),
        (b"\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x07", "the worker reset the stream (HTTP/2 error 7)"),
        (b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" + bytes(8), "the worker takes no calls"),
        (b"\x00\x00\x02\x01\x05\x00\x00\x00\x01\x00\x7f", "it does not speak gRPC"),
        (b"", "the connection was closed"),
    ],
)
async def test_whatever_else_answers_closes_the_stream_and_raises_nothing(answer: bytes, why: str) -> None:
    async def strange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(24)
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(strange, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        stream = await GrpcStream.open(f"127.0.0.1:{port}", PATH, Received())
        assert (await asyncio.wait_for(stream.closed, 10)).startswith(why)
        stream.close()


async def test_padding_priorities_and_unknown_frames_are_read_over() -> None:
    message = b"\x00\x00\x00\x00\x02hi"
    frames = [
        b"\x00\x00\x04\x63\x00\x00\x00\x00\x01what",
        b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"01234567",
        b"\x00\x00\x09\x01\x2c\x00\x00\x00\x01\x02\x00\x00\x00\x00\x00\x88\x00\x00",
        b"\x00\x00\x0b\x00\x08\x00\x00\x00\x01\x03" + message + b"\x00\x00\x00",
    ]
    pinged: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def strange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in b"".join(frames):  # In the smallest pieces that there are.
            writer.write(bytes([byte]))
            await writer.drain()
        await reader.readuntil(b"\x00\x00\x08\x06\x01\x00\x00\x00\x00")
        pinged.set_result(await reader.readexactly(8))
        writer.close()

    async with await asyncio.start_server(strange, "127.0.0.1", 0) as server:
        received = Received()
        stream = await GrpcStream.open(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", PATH, received)
        assert await received.count(1) == [b"hi"]
        assert await asyncio.wait_for(pinged, 10) == b"01234567"
        stream.close()


async def test_an_address_that_is_none_is_said() -> None:
    with pytest.raises(OSError, match="'somewhere' is not of the form host:port"):
        await GrpcStream.open("somewhere", PATH, Received())
