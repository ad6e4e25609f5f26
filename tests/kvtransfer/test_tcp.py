"""The `tcp` transport's server against clients that do not behave, and what its metadata says."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
from antiphon_kvtransfer.tcp import MAX_RANGES_PER_REQUEST, TcpMetadata, TcpTransport
from antiphon_kvtransfer.transport import PeerKey, ReadRange, Region, TransportError
from numpy.typing import NDArray

from tests.support.transport_peer import TransportPeer, empty_pool

WAIT_S = 60.0
_HELLO = struct.Struct("<4sI32s")
_RANGE = struct.Struct("<QQ")


@asynccontextmanager
async def _serving(pool: NDArray[np.uint8]) -> AsyncIterator[TcpMetadata]:
    transport = TcpTransport(Region(pool.ctypes.data, pool.nbytes))
    await transport.start()
    try:
        yield msgspec.msgpack.decode(transport.metadata(), type=TcpMetadata)
    finally:
        await transport.close()


async def _answer(metadata: TcpMetadata, hello: bytes, request: bytes, enough: int) -> bytes:
    """Everything the server says to these bytes, until it closes or `enough` has come."""
    reader, writer = await asyncio.open_connection(metadata.hosts[0], metadata.port)
    try:
        writer.write(hello + request)
        answer = b""
        # A server that closes with something unread sends a reset.
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionResetError):
                while len(answer) < enough and (part := await reader.read(1 << 16)):
                    answer += part
        return answer
    finally:
        writer.close()


async def test_the_token_opens_the_pool_and_nothing_else_does() -> None:
    pool = np.arange(256, dtype=np.uint8)
    request = struct.pack("<I", 1) + _RANGE.pack(16, 8)
    async with _serving(pool) as metadata:
        right = _HELLO.pack(b"AKVT", 1, metadata.token)
        assert (await _answer(metadata, right, request, 24))[16:] == bytes(range(16, 24))
        for wrong in (
            _HELLO.pack(b"AKVT", 1, bytes(32)),
            _HELLO.pack(b"AKVT", 2, metadata.token),
            _HELLO.pack(b"HTTP", 1, metadata.token),
        ):
            assert await _answer(metadata, wrong, request, 1) == b""


async def test_a_reader_with_a_wrong_token_is_told_by_an_error() -> None:
    pool = np.zeros(256, np.uint8)
    async with _serving(pool) as metadata:
        own = np.zeros(256, np.uint8)
        reader = TcpTransport(Region(own.ctypes.data, own.nbytes))
        forged = msgspec.structs.replace(metadata, token=bytes(32))
        with pytest.raises(TransportError, match="closed"):
            await reader.connect(PeerKey("peer/1/0"), msgspec.msgpack.encode(forged), WAIT_S)
        stale = msgspec.structs.replace(metadata, region_bytes=512)
        with pytest.raises(TransportError, match="another incarnation"):
            await reader.connect(PeerKey("peer/1/0"), msgspec.msgpack.encode(stale), WAIT_S)
        await reader.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        struct.pack("<I", 1) + _RANGE.pack(250, 7),
        struct.pack("<I", 1) + _RANGE.pack(2**64 - 1, 2),
        struct.pack("<I", 1) + _RANGE.pack(0, 0),
        struct.pack("<I", 2) + _RANGE.pack(0, 8) + _RANGE.pack(256, 1),
        struct.pack("<I", 0),
        struct.pack("<I", MAX_RANGES_PER_REQUEST + 1),
    ],
    ids=["past the end", "wraps around", "empty", "second range past the end", "no range", "too many ranges"],
)
async def test_a_request_that_breaks_the_bounds_gets_no_byte(request_bytes: bytes) -> None:
    pool = np.arange(256, dtype=np.uint8)
    async with _serving(pool) as metadata:
        hello = _HELLO.pack(b"AKVT", 1, metadata.token)
        assert len(await _answer(metadata, hello, request_bytes, 17)) == 16  # The welcome alone.


async def test_a_stopped_peer_is_left_by_the_deadline_alone_and_the_read_has_ended() -> None:
    """Closing the connection ends the read at once: the peer need not run on for that."""
    pool = empty_pool()
    reader = TcpTransport(Region(pool.ctypes.data, pool.nbytes))
    await reader.start()
    with TransportPeer("tcp") as peer:
        await reader.connect(peer.key, peer.metadata, WAIT_S)
        peer.stop()
        handle = reader.read(peer.key, [ReadRange(0, 0, pool.nbytes)])
        with pytest.raises(TransportError, match=r"within 0\.3 s"):
            await handle.wait(0.3)
        await asyncio.wait_for(handle.ended, WAIT_S)
        pool[:] = 0
        peer.go_on()
        await reader.connect(peer.key, peer.metadata, WAIT_S)
        await reader.read(peer.key, [ReadRange(0, 0, 16)]).wait(WAIT_S)
        assert not pool[16:].any()
    await reader.close()


async def test_more_reads_than_connections_wait_in_line() -> None:
    pool = empty_pool()
    reader = TcpTransport(Region(pool.ctypes.data, pool.nbytes), connections=2)
    await reader.start()
    with TransportPeer("tcp") as peer:
        await reader.connect(peer.key, peer.metadata, WAIT_S)
        peer.stop()
        stuck = [reader.read(peer.key, [ReadRange(0, 0, 1 << 20)]) for _ in range(2)]
        queued = reader.read(peer.key, [ReadRange(0, 1 << 20, 1 << 20)])
        for handle in stuck:
            with pytest.raises(TransportError):
                await handle.wait(0.1)
        peer.go_on()
        await queued.wait(WAIT_S)
        assert pool[1 << 20 : 2 << 20].any()
    await reader.close()


async def test_metadata_names_the_advertised_hosts_and_the_first_that_answers_is_used() -> None:
    pool = np.arange(256, dtype=np.uint8)
    holder = TcpTransport(Region(pool.ctypes.data, pool.nbytes), advertise=["::1", "127.0.0.1"])
    await holder.start()
    metadata = msgspec.msgpack.decode(holder.metadata(), type=TcpMetadata)
    assert metadata.hosts == ("::1", "127.0.0.1")
    own = np.zeros(256, np.uint8)
    reader = TcpTransport(Region(own.ctypes.data, own.nbytes))
    key = PeerKey("holder/1/0")
    await reader.connect(key, holder.metadata(), WAIT_S)
    await reader.read(key, [ReadRange(0, 0, 256)]).wait(WAIT_S)
    assert np.array_equal(own, pool)
    await reader.close()
    await holder.close()


def test_a_wildcard_must_be_told_what_to_advertise() -> None:
    with pytest.raises(ValueError, match="advertise"):
        TcpTransport(Region(4096, 4096), host="0.0.0.0")
    TcpTransport(Region(4096, 4096), host="0.0.0.0", advertise=["worker-0.workers"])


async def test_a_port_in_use_is_an_error_that_says_so() -> None:
    pool = np.zeros(16, np.uint8)
    async with _serving(pool) as metadata:
        second = TcpTransport(Region(pool.ctypes.data, pool.nbytes), port=metadata.port)
        with pytest.raises(TransportError, match=f"port {metadata.port}"):
            await second.start()
