"""A rank's data plane driven over a stream: what the driver is told, and what is left when the stream ends."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from antiphon_kvtransfer import remote_plane
from antiphon_kvtransfer.plane import KvPart, PeerPool, PeerRank, RankPlane, Wire
from antiphon_kvtransfer.remote_plane import RemoteRankPlane
from antiphon_kvtransfer.serve_plane import serve_rank_plane
from antiphon_kvtransfer.transport import ReadHandle, TransportError, TransportUnavailable

from tests.support.eventually import WAIT_S, eventually
from tests.support.told_reads import ToldRead

PART = KvPart(2, 4, 0, 2)
PEER = PeerPool("holder", "i1", (PeerRank(0, KvPart(0, 4, 0, 4), 32, 1600, (("tcp", b"here"),)),))


@dataclass
class ToldPlane(RankPlane):
    """Does what the test says."""

    rank: int = 1
    part: KvPart = PART
    num_blocks: int = 16
    block_bytes: int = 400
    connecting: asyncio.Event = field(default_factory=asyncio.Event)
    may_connect: asyncio.Event = field(default_factory=asyncio.Event)
    reads: list[ToldRead] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    start_problem: TransportError | None = None

    async def start(self) -> None:
        if self.start_problem is not None:
            raise self.start_problem

    @property
    def endpoints(self) -> tuple[tuple[str, bytes], ...]:
        return (("ucx", b"\x00\xff"), ("tcp", b"port"))

    async def connect(self, peer: PeerPool, deadline_s: float) -> Wire:
        assert peer == PEER
        self.connecting.set()
        try:
            await self.may_connect.wait()
        except asyncio.CancelledError:
            self.asked.append("connect given up")
            raise
        self.asked.append("connect")
        return Wire("tcp", 2.5, "tcp is used instead of ucx (not here)")

    def read(self, peer: PeerPool, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> ReadHandle:
        if (peer.worker_id, peer.incarnation) != ("holder", "i1"):
            raise TransportError(f"not connected to worker {peer.worker_id}")
        self.asked.append(f"read {list(remote_blocks)} {list(local_blocks)}")
        self.reads.append(ToldRead())
        return self.reads[-1]

    async def disconnect(self, peer: PeerPool) -> None:
        self.asked.append("disconnect")

    async def close(self) -> None:
        self.asked.append("close")


@asynccontextmanager
async def _driven(plane: ToldPlane | None = None) -> AsyncIterator[tuple[RemoteRankPlane, ToldPlane]]:
    """(the driver's end, the rank's), started."""
    plane = plane or ToldPlane()
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs)
    serving = asyncio.create_task(serve_rank_plane(plane, reader, writer))
    remote = RemoteRankPlane(1, PART, 16, 400, ours)
    try:
        await remote.start()
        yield remote, plane
    finally:
        await remote.close()
        async with asyncio.timeout(WAIT_S):
            await serving
    assert plane.asked[-1] == "close"


async def test_endpoints_wire_and_reads_come_through() -> None:
    async with _driven() as (remote, plane):
        assert remote.endpoints == plane.endpoints
        plane.may_connect.set()
        assert await remote.connect(PEER, WAIT_S) == Wire("tcp", 2.5, "tcp is used instead of ucx (not here)")
        read = remote.read(PEER, [7, 8, 30], [0, 1, 5])
        await eventually(lambda: len(plane.reads) == 1)
        plane.reads[0].complete()
        await read.wait(WAIT_S)
        assert read.ended.done()
        await remote.disconnect(PEER)
        assert plane.asked == ["connect", "read [7, 8, 30] [0, 1, 5]", "disconnect"]
        assert remote.problem == ""


async def test_a_failed_read_has_ended_only_when_the_rank_says_so() -> None:
    async with _driven() as (remote, plane):
        read = remote.read(PEER, [1], [2])
        await eventually(lambda: len(plane.reads) == 1)
        plane.reads[0].fail("no route")
        with pytest.raises(TransportError, match="rank 1: no route"):
            await read.wait(WAIT_S)
        await remote.disconnect(PEER)  # Whatever the rank had to say before, it has said.
        assert not read.ended.done()
        plane.reads[0].end()
        await asyncio.wait_for(asyncio.shield(read.ended), WAIT_S)


async def test_a_read_that_the_rank_cannot_start_fails_and_has_ended() -> None:
    async with _driven() as (remote, _):
        read = remote.read(PeerPool("stranger", "i1", ()), [1], [2])
        with pytest.raises(TransportError, match="rank 1: not connected to worker stranger"):
            await read.wait(WAIT_S)
        await asyncio.wait_for(asyncio.shield(read.ended), WAIT_S)


@pytest.mark.parametrize("how", ["deadline", "cancel", "cancel at once"])
async def test_a_read_that_was_given_up_is_given_up_by_the_rank(how: str) -> None:
    async with _driven() as (remote, plane):
        read = remote.read(PEER, [1], [2])
        if how == "deadline":
            with pytest.raises(TransportError, match=r"a read of 1 blocks by rank 1 did not end within 0\.05 s"):
                await read.wait(0.05)
        else:
            waiting = asyncio.create_task(read.wait(WAIT_S))
            if how == "cancel":
                await eventually(lambda: len(plane.reads) == 1)
            else:
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await eventually(lambda: len(plane.reads) == 1 and plane.reads[0].given_up)
        assert not read.ended.done()
        plane.reads[0].end()
        await asyncio.wait_for(asyncio.shield(read.ended), WAIT_S)


async def test_a_connect_that_was_given_up_is_over_before_the_next_word_about_that_peer() -> None:
    async with _driven() as (remote, plane):
        connecting = asyncio.create_task(remote.connect(PEER, WAIT_S))
        await plane.connecting.wait()
        connecting.cancel()
        await asyncio.wait({connecting})
        await remote.disconnect(PEER)
        assert plane.asked == ["connect given up", "disconnect"]
        plane.may_connect.set()
        await remote.connect(PEER, WAIT_S)
        assert plane.asked[-1] == "connect"


async def test_a_rank_that_does_not_answer_a_connect_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_plane, "_CONNECT_MARGIN_S", 0.0)
    async with _driven() as (remote, plane):
        with pytest.raises(TransportError, match=r"rank 1 did not wire up to worker holder within 0\.05 s"):
            await remote.connect(PEER, 0.05)
        await eventually(lambda: plane.asked == ["connect given up"])


async def test_a_rank_that_goes_takes_its_reads_and_its_memory_with_it() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs)
    plane = ToldPlane()
    serving = asyncio.create_task(serve_rank_plane(plane, reader, writer))
    remote = RemoteRankPlane(1, PART, 16, 400, ours)
    await remote.start()
    connecting = asyncio.create_task(remote.connect(PEER, WAIT_S))
    read = remote.read(PEER, [1], [2])
    await eventually(lambda: len(plane.reads) == 1 and plane.connecting.is_set())

    writer.transport.abort()
    gone = "rank 1 of this worker is gone: its stream"
    with pytest.raises(TransportError, match=gone):
        await read.wait(WAIT_S)
    assert read.ended.done()
    with pytest.raises(TransportError, match=gone):
        await connecting
    with pytest.raises(TransportError, match=gone):
        remote.read(PEER, [1], [2])
    assert remote.problem.startswith(gone)
    await remote.disconnect(PEER)
    await remote.close()
    async with asyncio.timeout(WAIT_S):
        await serving
    assert plane.asked[-1] == "close", "a rank whose driver is gone serves nobody"


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (struct.pack("<I", 1 << 30), "a message of 1073741824 bytes"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "cannot be understood"),
        (struct.pack("<I", 20) + b"half", "its stream has ended"),
    ],
    ids=["too long", "no message", "cut off"],
)
async def test_what_is_no_answer_ends_the_stream(sent: bytes, says: str) -> None:
    ours, theirs = socket.socketpair()
    remote = RemoteRankPlane(1, PART, 16, 400, ours)
    with theirs:
        starting = asyncio.create_task(remote.start())
        theirs.setblocking(False)
        await asyncio.get_running_loop().sock_recv(theirs, 100)
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(TransportError, match=f"rank 1 of this worker is gone: .*{says}"):
            await starting
    await remote.close()


async def test_what_is_no_command_closes_the_plane() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs)
    plane = ToldPlane()
    with ours:
        ours.sendall(struct.pack("<I", 2) + b"hi")
        async with asyncio.timeout(WAIT_S):
            await serve_rank_plane(plane, reader, writer)
    assert plane.asked == ["close"]


def _read_without_end(remote: RemoteRankPlane) -> None:
    blocks = list(range(16_384))
    for _ in range(1000):
        remote.read(PEER, blocks, blocks)


async def test_a_rank_that_takes_no_commands_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_plane, "MAX_WAITING_BYTES", 1 << 20)
    ours, theirs = socket.socketpair()
    remote = RemoteRankPlane(1, PART, 16, 400, ours)
    with theirs:
        starting = asyncio.create_task(remote.start())
        theirs.setblocking(False)
        await asyncio.get_running_loop().sock_recv(theirs, 100)
        with pytest.raises(TransportError, match="it takes no commands any more"):
            _read_without_end(remote)
        with pytest.raises(TransportError, match="it takes no commands any more"):
            await starting
    await remote.close()


async def test_another_rank_at_the_other_end_is_not_taken_for_this_one() -> None:
    with pytest.raises(TransportError, match=r"another rank answers for rank 1: it has \(3, "):
        async with _driven(ToldPlane(rank=3)):
            pass


async def test_a_rank_without_a_transport_says_why() -> None:
    with pytest.raises(TransportUnavailable, match="rank 1: no such library"):
        async with _driven(ToldPlane(start_problem=TransportUnavailable("no such library"))):
            pass
