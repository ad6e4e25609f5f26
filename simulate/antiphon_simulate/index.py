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


class _Hashes(dict[int, BlockHash]):
    """A trace's block ids as the index names blocks; made when first asked for."""

    def __missing__(self, block: int) -> BlockHash:
        found = self[block] = BlockHash(block.to_bytes(HASH_BYTES, "little"))
        return found


class Index:
    def __init__(self, events: Events, delay_ms: float, block_tokens: int, max_blocks: int, gateways: int) -> None:
        self._events = events
        self._delay_ms = delay_ms
        self._block_tokens = block_tokens
        self._mirror = BlockMirror(max_blocks)
        self._hashes = _Hashes()
        self._chains: dict[int, tuple[BlockHash, ...]] = {}
        self._published: dict[str, int] = {}
        self._dropped: list[dict[int, None]] = [{} for _ in range(gateways)]
        """For each gateway, blocks that some worker dropped since it asked for `evicted`."""

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

    def evicted(self, gateway: int) -> list[int]:
        """Those that left their last holder since its last call, and are held by nobody now."""
        hashes, mirror = self._hashes, self._mirror
        dropped, self._dropped[gateway] = self._dropped[gateway], {}
        # A chain of one block tells who holds it.
        return [block for block in dropped if not mirror.leading_blocks(_MODEL, (hashes[block],))]

    def contents(self, worker_id: str) -> frozenset[BlockHash]:
        """What the mirror believes the worker to hold."""
        return self._mirror.contents(_MODEL, worker_id)

    def hash_of(self, block: int) -> BlockHash:
        return self._hashes[block]

    def _chain(self, request: TraceRequest) -> tuple[BlockHash, ...]:
        chain = self._chains.get(request.index)
        if chain is None:
            full = request.prompt_tokens // self._block_tokens
            chain = self._chains[request.index] = tuple([self._hashes[block] for block in request.blocks[:full]])
        return chain

    def _apply(self, worker_id: str, previous: int, stored: Sequence[int], removed: Sequence[int]) -> None:
        hashes = self._hashes
        applied = self._mirror.apply(
            _MODEL,
            worker_id,
            incarnation=_INCARNATION,
            previous=previous,
            sequence=previous + 1,
            stored=[hashes[block] for block in stored],
            removed=[hashes[block] for block in removed],
        )
        assert applied is Applied.APPLIED, f"{worker_id}: delta {previous + 1} was taken as {applied}"
        for dropped in self._dropped:
            dropped.update(dict.fromkeys(removed))
