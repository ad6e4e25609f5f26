"""The block index as a gateway has it: the real `BlockMirror`, fed with what workers stored and removed a while ago.

Only the way is shortened: deltas come from the simulated pools after a fixed delay, not through Redis.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon_kvtransfer.identity import HASH_BYTES, BlockHash
from antiphon_kvtransfer.mirror import Applied, BlockMirror, Position

from antiphon_simulate.events import Events
from antiphon_simulate.pool import BlockPool
from antiphon_simulate.records import TraceRequest

_MODEL = "trace"
_INCARNATION = "first"


class Index:
    def __init__(self, events: Events, delay_ms: float, block_tokens: int, max_blocks: int) -> None:
        self._events = events
        self._delay_ms = delay_ms
        self._block_tokens = block_tokens
        self._mirror = BlockMirror(max_blocks)
        self._hashes: dict[int, BlockHash] = {}
        self._chains: dict[int, tuple[BlockHash, ...]] = {}
        self._published: dict[str, int] = {}
        self._gone: list[int] = []

    def add_worker(self, worker_id: str) -> None:
        self._mirror.load(_MODEL, worker_id, Position(_INCARNATION, 0), ())
        self._published[worker_id] = 0

    def publish(self, worker_id: str, pool: BlockPool) -> None:
        """What changed in the worker's pool is on its way to the mirror."""
        if pool.is_changed:
            stored, removed = pool.take_changes()
            previous = self._published[worker_id]
            self._published[worker_id] = previous + 1
            self._events.at(self._events.now_ms + self._delay_ms, self._apply, worker_id, previous, stored, removed)

    def leading_blocks(self, request: TraceRequest) -> dict[str, int]:
        return self._mirror.leading_blocks(_MODEL, self._chain(request))

    def forget_request(self, request: TraceRequest) -> None:
        """It is answered: nobody will ask for its chain again."""
        self._chains.pop(request.index, None)

    def evicted(self) -> list[int]:
        gone, self._gone = self._gone, []
        return gone

    def contents(self, worker_id: str) -> frozenset[BlockHash]:
        """What the mirror believes the worker to hold."""
        return self._mirror.contents(_MODEL, worker_id)

    def hash_of(self, block: int) -> BlockHash:
        found = self._hashes.get(block)
        if found is None:
            found = self._hashes[block] = BlockHash(block.to_bytes(HASH_BYTES, "little"))
        return found

    def _chain(self, request: TraceRequest) -> tuple[BlockHash, ...]:
        chain = self._chains.get(request.index)
        if chain is None:
            full = request.prompt_tokens // self._block_tokens
            chain = self._chains[request.index] = tuple(self.hash_of(block) for block in request.blocks[:full])
        return chain

    def _apply(self, worker_id: str, previous: int, stored: Sequence[int], removed: Sequence[int]) -> None:
        applied = self._mirror.apply(
            _MODEL,
            worker_id,
            incarnation=_INCARNATION,
            previous=previous,
            sequence=previous + 1,
            stored=[self.hash_of(block) for block in stored],
            removed=[self.hash_of(block) for block in removed],
        )
        assert applied is Applied.APPLIED, f"{worker_id}: delta {previous + 1} was taken as {applied}"
        # A chain of one block tells who holds it.
        self._gone += [b for b in removed if not self._mirror.leading_blocks(_MODEL, (self.hash_of(b),))]
