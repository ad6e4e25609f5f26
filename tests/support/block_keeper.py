"""A small engine, as links and pins see one: real memory in blocks, an index by hash, counts of who keeps what.

It reuses blocks as a busy engine does: `reuse` overwrites every block that nobody keeps and forgets its hash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from antiphon_kvtransfer.cards import LocalWorker
from antiphon_kvtransfer.data_plane import DataPlane
from antiphon_kvtransfer.identity import HASH_BYTES, BlockHash
from antiphon_kvtransfer.local_plane import LocalRankPlane
from antiphon_kvtransfer.plane import KvPart
from antiphon_kvtransfer.transport import Region, Transport
from numpy.typing import NDArray

REUSED = 255
"""What blocks are overwritten with."""


def hash_of(content: int) -> BlockHash:
    """The id of a block whose bytes are all `content`."""
    return BlockHash(bytes([content]) * HASH_BYTES)


class FakeKeeper:
    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.memory: NDArray[np.uint8] = np.zeros((num_blocks, block_bytes), np.uint8)
        self.kept: Counter[int] = Counter()
        self._index: dict[BlockHash, int] = {}
        self._partial: dict[str, int] = {}

    @property
    def region(self) -> Region:
        return Region(self.memory.ctypes.data, self.memory.nbytes)

    def local_worker(self, worker_id: str, incarnation: str, kv_format: str = "test/64/plain") -> LocalWorker:
        return LocalWorker(worker_id, incarnation, kv_format, self.memory.shape[1], layers=1, kv_heads=1)

    def plane(self, transports: Sequence[Transport]) -> DataPlane:
        """Of one rank, which holds everything."""
        num_blocks, block_bytes = self.memory.shape
        return DataPlane([LocalRankPlane(0, KvPart(0, 1, 0, 1), self.region, block_bytes, num_blocks, transports)])

    def store(self, block: int, content: int) -> None:
        self.memory[block] = content
        self._index[hash_of(content)] = block

    def store_partial(self, request_id: str, block: int, content: int) -> None:
        self.memory[block] = content
        self._partial[request_id] = block

    def reuse(self) -> list[int]:
        """Overwrite all blocks that nobody keeps. Returns which."""
        free = [block for block in range(len(self.memory)) if not self.kept[block]]
        for block in free:
            self.memory[block] = REUSED
        self._index = {name: block for name, block in self._index.items() if self.kept[block]}
        return free

    def contents(self, blocks: Sequence[int]) -> list[int]:
        """The byte that fills each block; -1 for a block of different bytes."""
        rows = [self.memory[block] for block in blocks]
        return [int(row[0]) if (row == row[0]).all() else -1 for row in rows]

    def kept_blocks(self) -> int:
        return sum(1 for count in self.kept.values() if count)

    # BlockKeeper

    def pin(self, hashes: Sequence[BlockHash]) -> list[int]:
        blocks: list[int] = []
        for name in hashes:
            if name not in self._index:
                break
            blocks.append(self._index[name])
        self.retain(blocks)
        return blocks

    def pin_partial(self, request_id: str) -> list[int]:
        blocks = [self._partial[request_id]] if request_id in self._partial else []
        self.retain(blocks)
        return blocks

    def retain(self, blocks: Sequence[int]) -> None:
        self.kept.update(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        self.kept.subtract(blocks)
        assert all(self.kept[block] >= 0 for block in blocks), "released more often than kept"
