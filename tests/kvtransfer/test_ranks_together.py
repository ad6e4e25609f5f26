"""Several ranks as one: what a read of all is, how fast blocks come over all their wires, and what is said of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from antiphon_kvtransfer._reads import JoinedRead
from antiphon_kvtransfer.data_plane import DataPlane
from antiphon_kvtransfer.local_plane import LocalRankPlane
from antiphon_kvtransfer.plane import KvPart, PeerPool, PeerRank, RankPlane, Wire, wire_of_shares
from antiphon_kvtransfer.tcp import TcpTransport
from antiphon_kvtransfer.transport import PeerKey, ReadHandle, ReadRange, Region, TransportError

from tests.support.eventually import WAIT_S
from tests.support.told_reads import ToldRead

LEFT, RIGHT = KvPart(0, 4, 0, 1), KvPart(0, 4, 1, 2)
WHOLE = KvPart(0, 4, 0, 2)
BLOCK_BYTES = 64
"""Of a rank with half of the heads."""


async def _settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_read_is_complete_when_all_its_parts_are() -> None:
    parts = [ToldRead(), ToldRead()]
    read = JoinedRead(parts)
    waiting = asyncio.create_task(read.wait(WAIT_S))
    parts[1].complete()
    await _settled()
    assert not waiting.done()
    assert not read.ended.done()
    parts[0].complete()
    await waiting
    await _settled()
    assert read.ended.done()


async def test_a_part_that_fails_gives_the_others_up_and_the_last_to_end_ends_it() -> None:
    parts = [ToldRead(), ToldRead(), ToldRead()]
    read = JoinedRead(parts)
    waiting = asyncio.create_task(read.wait(WAIT_S))
    parts[0].complete()
    parts[1].fail("no route")
    with pytest.raises(TransportError, match="no route"):
        await waiting
    assert parts[2].given_up
    parts[1].end()
    await _settled()
    assert not read.ended.done()
    parts[2].end()
    await _settled()
    assert read.ended.done()


@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_who_gives_the_whole_up_gives_every_part_up(how: str) -> None:
    parts = [ToldRead(), ToldRead()]
    read = JoinedRead(parts)
    waiting = asyncio.create_task(read.wait(0.01 if how == "deadline" else WAIT_S))
    if how == "cancel":
        await asyncio.sleep(0)
        waiting.cancel()
    with pytest.raises(TransportError if how == "deadline" else asyncio.CancelledError):
        await waiting
    assert all(part.given_up for part in parts)
    assert not read.ended.done()


def test_whole_blocks_come_as_fast_as_the_slowest_rank_brings_its_share() -> None:
    fast, slow = Wire("ucx", 10.0, ""), Wire("ucx", 6.0, "")
    assert wire_of_shares([("rank 0", LEFT, fast), ("rank 1", RIGHT, slow)]) == Wire("ucx", 12.0, "")
    quarter, rest = KvPart(0, 2, 0, 1), KvPart(2, 8, 0, 1)
    assert wire_of_shares([("rank 0", quarter, slow), ("rank 1", rest, fast)]).gigabytes_per_s == pytest.approx(40 / 3)


def test_copies_of_a_head_bring_the_same_share_and_count_once() -> None:
    ten = Wire("ucx", 10.0, "")
    shares = [("rank 0", LEFT, ten), ("rank 1", LEFT, ten), ("rank 2", RIGHT, ten), ("rank 3", RIGHT, ten)]
    assert wire_of_shares(shares).gigabytes_per_s == 20.0


def test_the_rank_that_fell_to_another_transport_is_named() -> None:
    fell = Wire("tcp", 5.0, "tcp is used instead of ucx (no such library)")
    good = Wire("ucx", 1.0, "")
    one = wire_of_shares([("rank 0", LEFT, good), ("rank 1", RIGHT, fell)])
    assert one == Wire("tcp", 2.0, f"rank 1: {fell.detail}")
    both = wire_of_shares([("rank 0", LEFT, fell), ("rank 1", RIGHT, fell)])
    assert both == Wire("tcp", 10.0, f"rank 0, rank 1: {fell.detail}")
    assert wire_of_shares([("rank 0", WHOLE, fell)]) is fell


# ------------------------------------------------------------------------------------------------ local ranks over tcp


class NoReads(TcpTransport):
    """Connects; after its first read of a block it starts none."""

    refuses = False

    def read(self, peer: PeerKey, ranges: Sequence[ReadRange]) -> ReadHandle:
        if self.refuses:
            raise TransportError("no descriptors left")
        return super().read(peer, ranges)


class _Pool:
    def __init__(self, rank: int, part: KvPart, transport: type[TcpTransport] = TcpTransport) -> None:
        block_bytes = part.layers * part.heads * BLOCK_BYTES // 4
        self.memory = np.full((8, block_bytes), rank + 1, np.uint8)
        region = Region(self.memory.ctypes.data, self.memory.nbytes)
        self.transport = transport(region)
        self.plane = LocalRankPlane(rank, part, region, block_bytes, 8, [self.transport])


def _peer_of(*ranks: RankPlane) -> PeerPool:
    peers = [PeerRank(one.rank, one.part, one.num_blocks, one.block_bytes, one.endpoints) for one in ranks]
    return PeerPool("holder", "i1", tuple(peers))


async def test_a_rank_that_cannot_start_its_part_fails_the_read_after_the_others_have_ended() -> None:
    holder = _Pool(0, WHOLE)
    left, right = _Pool(0, LEFT), _Pool(1, RIGHT, NoReads)
    mine = DataPlane([left.plane, right.plane])
    await holder.plane.start()
    await mine.start()
    try:
        peer = _peer_of(holder.plane)
        with pytest.raises(TransportError, match="not connected to worker holder"):
            mine.read(peer, [0], [0])
        await mine.connect(peer, WAIT_S)
        with pytest.raises(TransportError, match="local block 8 is none of rank 0's 8 blocks"):
            mine.read(peer, [0], [8])
        assert isinstance(right.transport, NoReads)
        right.transport.refuses = True
        read = mine.read(peer, [0], [0])
        with pytest.raises(TransportError, match="no descriptors left"):
            await read.wait(WAIT_S)
        await asyncio.wait_for(asyncio.shield(read.ended), WAIT_S)
    finally:
        await mine.close()
        await holder.plane.close()


async def test_a_worker_is_wired_up_on_all_ranks_or_on_none() -> None:
    holder = _Pool(0, LEFT)
    left, right = _Pool(0, LEFT), _Pool(1, RIGHT)
    mine = DataPlane([left.plane, right.plane])
    await holder.plane.start()
    await mine.start()
    try:
        peer = _peer_of(holder.plane)
        with pytest.raises(TransportError, match="no rank of worker holder holds anything of rank 1's part"):
            await mine.connect(peer, WAIT_S)
        with pytest.raises(TransportError, match="not connected to worker holder"):
            left.plane.read(peer, [0], [0])
    finally:
        await mine.close()
        await holder.plane.close()


def test_pools_of_different_sizes_are_no_worker() -> None:
    short = LocalRankPlane(1, RIGHT, Region(0, 4 * BLOCK_BYTES), BLOCK_BYTES, 4, [])
    with pytest.raises(ValueError, match="rank 0: 8, rank 1: 4"):
        DataPlane([_Pool(0, LEFT).plane, short])


def test_a_region_too_small_for_its_blocks_is_no_pool() -> None:
    with pytest.raises(ValueError, match="5 blocks of 64 bytes are not in 256 bytes"):
        LocalRankPlane(0, LEFT, Region(0, 256), 64, 5, [])
    with pytest.raises(ValueError, match="66 bytes are no whole number"):
        LocalRankPlane(0, LEFT, Region(0, 256), 66, 1, [])
