"""Who holds which block, for one model: bit masks over workers, and the look-up of a chain's leading blocks.

Per block hash an integer whose bit s says that the worker in slot s holds it: one AND narrows a thousand workers at
once. A worker's set is prefix-closed (a block is evicted before its parent, never after), so a worker that holds the
chain's block i holds all before it, and the lengths are found by bisecting the chain, not by walking it.

Small, because a million blocks are held: a mask is one shared object however many blocks have it, and what one
worker holds is not a second set but a *log*, the packed hashes of what it stored. The masks are the truth; the log only
says where to look when the worker goes. It may name blocks that are no longer held, and is rewritten when half of
it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import iter_unpack

from antiphon_kvtransfer.identity import HASH_BYTES, BlockHash

_ONE_HASH = f"{HASH_BYTES}s"

_SHARED_MASKS = 16_384
"""So many masks are remembered to be shared. Forgetting them is harmless: equal masks are then two objects."""

_EXPANDED_BYTES = 4_000_000
"""Masks that were asked for are kept beside their worker ids, up to about this size."""

_EXPANDED_ENTRY_BYTES = 300
"""Of one of them, with its mask over a thousand workers; each worker id adds a pointer."""

_LOG_SLACK = 1024
"""Logs up to this many hashes above twice what is held are left alone."""


class Holding:
    """What one worker holds: its bit in the masks, how many blocks have it, and the log that finds them again."""

    __slots__ = ("bit", "count", "log", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.bit = 1 << slot
        self.count = 0
        self.log = bytearray()

    def logged(self) -> list[BlockHash]:
        """All that was stored since the log was written anew: held or not, some of it twice."""
        return [block for (block,) in iter_unpack(_ONE_HASH, self.log)]


class Holders:
    """One model's masks. Slots are dense and reused, so masks stay as short as there are workers."""

    def __init__(self) -> None:
        self.holders: dict[BlockHash, int] = {}
        self.slots: list[str | None] = []
        self._masks: dict[int, int] = {}
        self._expanded: dict[int, tuple[str, ...]] = {}
        self._expanded_bytes = 0

    def open(self, worker_id: str) -> Holding:
        """A slot for a worker that has none."""
        slot = self.slots.index(None) if None in self.slots else len(self.slots)
        if slot == len(self.slots):
            self.slots.append(worker_id)
        else:
            self.slots[slot] = worker_id
        return Holding(slot)

    def close(self, holding: Holding) -> None:
        """Forget the worker and all that it holds; its slot is free again."""
        self.remove(holding, holding.logged())
        self.slots[holding.slot] = None
        self._forget_expanded()

    def add(self, holding: Holding, hashes: Sequence[BlockHash]) -> None:
        """The worker holds these too. Ones that it held already change nothing."""
        holders, bit = self.holders, holding.bit
        known = len(holders)
        before, after = bit, bit
        for block in hashes:
            mask = holders.setdefault(block, bit)
            if mask is not before:
                before, after = mask, self._shared(mask, mask | bit)
            if after is not mask:
                holders[block] = after
                holding.count += 1
        holding.count += len(holders) - known
        holding.log += b"".join(hashes)
        if len(holding.log) > (2 * holding.count + _LOG_SLACK) * HASH_BYTES:
            holding.log = bytearray(b"".join(self.held(holding)))

    def remove(self, holding: Holding, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """The worker holds these no longer; returns those that nobody holds now. Ones it does not hold are ignored."""
        holders, bit = self.holders, holding.bit
        before, after = 0, 0
        gone: list[BlockHash] = []
        for block in hashes:
            mask = holders.get(block, 0)
            if mask == bit:
                del holders[block]
                gone.append(block)
            elif mask & bit:
                if mask is not before:
                    before, after = mask, self._shared(mask, mask ^ bit)
                holders[block] = after
                holding.count -= 1
        holding.count -= len(gone)
        return gone

    def held(self, holding: Holding) -> frozenset[BlockHash]:
        """All that the worker holds."""
        holders, bit = self.holders, holding.bit
        return frozenset(block for block in holding.logged() if holders.get(block, 0) & bit)

    def leading(self, chain: Sequence[BlockHash]) -> list[tuple[int, tuple[str, ...]]]:
        """(Leading blocks of `chain`, who holds exactly so many): each worker that holds any, once."""
        if not chain:
            return []
        held_by = self.holders.get
        everyone = held_by(chain[0], 0)
        if not everyone:
            return []
        last = held_by(chain[-1], 0)
        if last == everyone:
            return [(len(chain), self._workers(everyone))]
        groups: list[tuple[int, tuple[str, ...]]] = []
        whole = everyone & last
        if whole:
            groups.append((len(chain), self._workers(whole)))
            everyone ^= whole
        # Each entry: these workers hold at least `low` and fewer than `high` leading blocks.
        spans = [(everyone, 1, len(chain))]
        while spans:
            mask, low, high = spans.pop()
            while high - low > 1:
                middle = (low + high) >> 1
                holders = held_by(chain[middle - 1], 0)
                if holders == mask:
                    low = middle
                    continue
                longer = mask & holders
                if longer == mask:
                    low = middle
                    continue
                if longer:
                    spans.append((longer, middle, high))
                    mask ^= longer
                high = middle
            groups.append((low, self._workers(mask)))
        return groups

    def _shared(self, before: int, mask: int) -> int:
        """The one object that stands for `mask`: `before` itself where nothing changes."""
        if mask == before:
            return before
        if len(self._masks) >= _SHARED_MASKS:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)

    def _workers(self, mask: int) -> tuple[str, ...]:
        """The workers whose bits are set, from memory if the mask was asked for before."""
        workers = self._expanded.get(mask)
        if workers is None:
            workers = tuple(worker_id for slot in _bits(mask) if (worker_id := self.slots[slot]) is not None)
            if self._expanded_bytes > _EXPANDED_BYTES:
                self._forget_expanded()
            self._expanded[mask] = workers
            self._expanded_bytes += _EXPANDED_ENTRY_BYTES + 8 * len(workers)
        return workers

    def _forget_expanded(self) -> None:
        self._expanded.clear()
        self._expanded_bytes = 0


def _bits(mask: int) -> Iterator[int]:
    """Positions of the set bits."""
    digits = bin(mask)[:1:-1]
    at = digits.find("1")
    while at >= 0:
        yield at
        at = digits.find("1", at + 1)
