"""One end of KV links whose pool is cut over ranks: an index, a driver, and what every rank holds, byte by byte.

The model is small: LAYERS layers of KV heads, CELL_BYTES for a layer of a head of a block. A block's content follows
from a number, and no two layers or heads of it are alike.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import numpy as np
from antiphon_engine.parallel import ModelDims, ParallelShape, kv_part
from antiphon_kvtransfer.cards import LocalWorker
from antiphon_kvtransfer.data_plane import DataPlane
from antiphon_kvtransfer.links import PeerAddress, PeerLinks
from antiphon_kvtransfer.plane import KvPart
from antiphon_proto import worker_pb2_grpc
from numpy.typing import NDArray

from tests.support.block_keeper import FakeKeeper
from tests.support.eventually import WAIT_S
from tests.support.rank_process import HostedRank, RankProcess, map_pool

LAYERS = 4
CELL_BYTES = 48
NUM_BLOCKS = 24

_files = itertools.count()


@functools.cache
def whole_block(content: int, kv_heads: int) -> NDArray[np.uint8]:
    """[head][layer][byte]"""
    return np.random.default_rng(content).integers(1, 255, (kv_heads, LAYERS, CELL_BYTES), np.uint8)


def cut(whole: NDArray[np.uint8], part: KvPart) -> NDArray[np.uint8]:
    """What a rank's pool holds of a block, flat."""
    return whole[part.head_begin : part.head_end, part.layer_begin : part.layer_end].reshape(-1)


@dataclass
class RankedWorker:
    keeper: FakeKeeper
    links: PeerLinks
    peer: PeerAddress
    kv_heads: int
    ranks: Sequence[HostedRank]
    pools: Sequence[NDArray[np.uint8]]

    def store(self, block: int, content: int) -> None:
        self.keeper.store(block, content)
        self._write(block, content)

    def store_partial(self, request_id: str, block: int, content: int) -> None:
        self.keeper.store_partial(request_id, block, content)
        self._write(block, content)

    def holds(self, block: int, content: int) -> bool:
        """Every rank its part of it, each byte."""
        whole = whole_block(content, self.kv_heads)
        return all(
            np.array_equal(pool[block], cut(whole, rank.part))
            for rank, pool in zip(self.ranks, self.pools, strict=True)
        )

    def is_empty(self, block: int) -> bool:
        return not any(pool[block].any() for pool in self.pools)

    def _write(self, block: int, content: int) -> None:
        whole = whole_block(content, self.kv_heads)
        for rank, pool in zip(self.ranks, self.pools, strict=True):
            pool[block] = cut(whole, rank.part)


@asynccontextmanager
async def ranked_worker(
    worker_id: str,
    shape: ParallelShape,
    folder: Path,
    process_of: Callable[[int], RankProcess],
    *,
    transport: str,
    kv_heads: int = 4,
) -> AsyncIterator[RankedWorker]:
    """Its ranks live in the processes that `process_of` gives for each. Nothing is kept when the worker ends."""
    ranks = []
    for rank in range(shape.ranks):
        part = kv_part(shape, ModelDims(LAYERS, 8, kv_heads), rank)
        file = folder / f"{next(_files)}.pool"
        block_bytes = part.layers * part.heads * CELL_BYTES
        file.write_bytes(bytes(NUM_BLOCKS * block_bytes))
        ranks.append(HostedRank(rank, part, NUM_BLOCKS, block_bytes, str(file), transport))
    pools = [map_pool(rank) for rank in ranks]
    keeper = FakeKeeper(NUM_BLOCKS, 1)
    local = LocalWorker(worker_id, "i1", "test/64/plain", kv_heads * LAYERS * CELL_BYTES, LAYERS, kv_heads)
    plane = DataPlane([process_of(rank.rank).plane(rank) for rank in ranks])
    # No death is to be noticed by silence here, nor a busy machine to be taken for one.
    links = PeerLinks(local, plane, keeper, heartbeat_ms=500, lost_after_ms=int(WAIT_S * 1000))
    server = grpc.aio.server()
    worker_pb2_grpc.add_KvBlocksServicer_to_server(links.servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    try:
        await links.start()
        await server.start()
        peer = PeerAddress(worker_id, "i1", f"127.0.0.1:{port}")
        yield RankedWorker(keeper, links, peer, kv_heads, ranks, pools)
    finally:
        await links.close()
        await server.stop(None)
    assert keeper.kept_blocks() == 0
