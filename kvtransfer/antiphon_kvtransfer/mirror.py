"""A gateway's copy of the block index: which worker holds which KV blocks. No I/O.

The question it answers is "for this chain, how many leading blocks does each worker hold", for a thousand workers,
on the way of every request. The one idea: per block hash an integer whose bit s says that the worker in slot s
holds it. One AND narrows a thousand workers at once. A worker's set is prefix-closed (a block is evicted before
its parent, never after), so a worker that holds the chain's block i holds all before it, and the lengths are found by
bisecting the chain: the first probes throw most workers and most of the chain away.

Contents belong to an (incarnation, sequence). A delta counts only if it continues exactly there; otherwise it is
stale (ignored) or a gap (the reader must load the worker anew). Memory is bounded by `max_blocks` held in all: a
worker whose news no longer fits keeps its closed subset, shrinking, until it is loaded anew (`incomplete`).

Answers are hints for routing: whoever pulls a block still asks its holder to pin it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from antiphon_kvtransfer.identity import BlockHash


class Applied(enum.Enum):
    APPLIED = "applied"
    STALE = "stale"
    """At or below what the mirror has: nothing to do."""
    GAP = "gap"
    """Something in between was missed, or it is of another incarnation: load the worker anew."""


@dataclass(frozen=True, slots=True)
class Position:
    """Up to where the mirror knows a worker's set."""

    incarnation: str
    sequence: int


@dataclass(slots=True)
class _Holding:
    slot: int
    position: Position
    hashes: set[BlockHash] = field(default_factory=set)
    complete: bool = True


class _ModelMirror:
    """One model's holders. Slots are dense and reused, so masks stay as short as there are workers."""

    def __init__(self) -> None:
        self.holders: dict[BlockHash, int] = {}
        self.holdings: dict[str, _Holding] = {}
        self.slots: list[str | None] = []

    def open(self, worker_id: str, position: Position) -> _Holding:
        slot = self.slots.index(None) if None in self.slots else len(self.slots)
        if slot == len(self.slots):
            self.slots.append(worker_id)
        else:
            self.slots[slot] = worker_id
        holding = self.holdings[worker_id] = _Holding(slot, position)
        return holding

    def close(self, worker_id: str) -> int:
        """Forget the worker; how many blocks it held."""
        holding = self.holdings.pop(worker_id, None)
        if holding is None:
            return 0
        self.slots[holding.slot] = None
        count = len(holding.hashes)
        self.remove(holding, tuple(holding.hashes))
        return count

    def add(self, holding: _Holding, hashes: Iterable[BlockHash]) -> None:
        bit = 1 << holding.slot
        for block in hashes:
            self.holders[block] = self.holders.get(block, 0) | bit
            holding.hashes.add(block)

    def remove(self, holding: _Holding, hashes: Iterable[BlockHash]) -> None:
        keep = ~(1 << holding.slot)
        for block in hashes:
            if block not in holding.hashes:
                continue
            holding.hashes.discard(block)
            rest = self.holders[block] & keep
            if rest:
                self.holders[block] = rest
            else:
                del self.holders[block]


class BlockMirror:
    """See the module's docstring. Used from one thread."""

    def __init__(self, max_blocks: int = 2_000_000) -> None:
        """`max_blocks`: (worker, block) pairs kept in all, at roughly 200 to 400 bytes each."""
        self._max_blocks = max_blocks
        self._models: dict[str, _ModelMirror] = {}
        self.blocks = 0
        """(worker, block) pairs held now."""

    # -- questions

    def leading_blocks(self, model: str, chain: Sequence[BlockHash]) -> dict[str, int]:
        """Leading blocks of `chain` that each worker holds; workers that hold none are left out."""
        mirror = self._models.get(model)
        if mirror is None or not chain:
            return {}
        holders = mirror.holders
        everyone = holders.get(chain[0], 0)
        if not everyone:
            return {}
        lengths: dict[str, int] = {}
        # Each entry: these workers hold at least `low` and fewer than `high` leading blocks.
        spans = [(everyone, 1, len(chain) + 1)]
        while spans:
            mask, low, high = spans.pop()
            while high - low > 1:
                # Gallop from what is known, then bisect: most chains share only a short stretch.
                middle = min(low * 2, (low + high) // 2)
                longer = mask & holders.get(chain[middle - 1], 0)
                if longer == mask:
                    low = middle
                elif not longer:
                    high = middle
                else:
                    spans.append((longer, middle, high))
                    mask &= ~longer
                    high = middle
            for slot in _bits(mask):
                worker_id = mirror.slots[slot]
                if worker_id is not None:
                    lengths[worker_id] = low
        return lengths

    def contents(self, model: str, worker_id: str) -> frozenset[BlockHash]:
        """All blocks the worker holds, as far as known here."""
        holding = self._holding(model, worker_id)
        return frozenset(holding.hashes) if holding else frozenset()

    def position(self, model: str, worker_id: str) -> Position | None:
        """Up to where the worker's set is known; None when nothing is."""
        holding = self._holding(model, worker_id)
        return holding.position if holding else None

    def incomplete(self, model: str) -> tuple[str, ...]:
        """Workers whose sets did not fit. Empty while `max_blocks` still leaves too little room to try again."""
        if self.blocks > self._max_blocks * 3 // 4 or model not in self._models:
            return ()
        return tuple(worker for worker, held in self._models[model].holdings.items() if not held.complete)

    # -- changes

    def load(self, model: str, worker_id: str, position: Position, hashes: Sequence[BlockHash]) -> None:
        """Replace what is known of the worker by its whole set at `position`."""
        self.forget(model, worker_id)
        mirror = self._models.setdefault(model, _ModelMirror())
        holding = mirror.open(worker_id, position)
        if self.blocks + len(hashes) > self._max_blocks:
            holding.complete = False
            return
        mirror.add(holding, hashes)
        self.blocks += len(holding.hashes)

    def apply(
        self,
        model: str,
        worker_id: str,
        *,
        incarnation: str,
        previous: int,
        sequence: int,
        stored: Sequence[BlockHash],
        removed: Sequence[BlockHash],
    ) -> Applied:
        """Move the worker's set from sequence `previous` to `sequence`, if that is where it stands."""
        holding = self._holding(model, worker_id)
        if holding is None or holding.position.incarnation != incarnation:
            return Applied.GAP
        if sequence <= holding.position.sequence:
            return Applied.STALE
        if previous != holding.position.sequence:
            return Applied.GAP
        mirror = self._models[model]
        before = len(holding.hashes)
        mirror.remove(holding, removed)
        if holding.complete and self.blocks - before + len(holding.hashes) + len(stored) > self._max_blocks:
            holding.complete = False
        if holding.complete:
            mirror.add(holding, stored)
        self.blocks += len(holding.hashes) - before
        holding.position = Position(incarnation, sequence)
        return Applied.APPLIED

    def forget(self, model: str, worker_id: str) -> None:
        """Nothing is known of the worker any more. Unknown ones are ignored."""
        mirror = self._models.get(model)
        if mirror is not None:
            self.blocks -= mirror.close(worker_id)

    def forget_model(self, model: str) -> None:
        mirror = self._models.pop(model, None)
        if mirror is not None:
            self.blocks -= sum(len(holding.hashes) for holding in mirror.holdings.values())

    def _holding(self, model: str, worker_id: str) -> _Holding | None:
        mirror = self._models.get(model)
        return mirror.holdings.get(worker_id) if mirror else None


def _bits(mask: int) -> Iterator[int]:
    """Positions of the set bits."""
    digits = bin(mask)[:1:-1]
    at = digits.find("1")
    while at >= 0:
        yield at
        at = digits.find("1", at + 1)
