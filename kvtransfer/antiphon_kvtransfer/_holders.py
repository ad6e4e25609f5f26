"""Who holds which block, for one model: bit masks over workers, and the look-up of a chain's leading blocks.

Per block hash an integer whose bit s says that the worker in slot s holds it: one AND narrows a thousand workers at
once. A worker's set is prefix-closed (a block is evicted before its parent, never after), so a worker that holds the
chain's block i holds all before it, and the lengths are found by bisecting the chain, not by walking it. Where nearly
every block has other holders than the one before, bisecting touches every block anyway: there it walks, and who left
along a stretch is remembered beside the stretch's masks. As masks are shared objects, comparing them costs nothing.

Small, because a million blocks are held: a mask is one shared object however many blocks have it, and what one
worker holds is not a second set but a *log*, the packed hashes of what it stored. The masks are the truth; the log only
says where to look when the worker goes. It may name blocks that are no longer held, and is rewritten when half of
it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, repeat
from struct import iter_unpack

from antiphon_kvtransfer.identity import HASH_BYTES, BlockHash

_ONE_HASH = f"{HASH_BYTES}s"

_SHARED_MASKS = 16_384
"""So many masks are remembered to be shared. Forgetting them is harmless: equal masks are then two objects."""

_EXPANDED_BYTES = 4_000_000
"""Masks that were asked for, and stretches of them, are kept beside their worker ids, up to about this size."""

_EXPANDED_ENTRY_BYTES = 300
"""Of one mask over a thousand workers; each worker id adds a pointer."""

_STRETCH_BLOCKS = 32
"""What was found by walking is remembered by so many blocks: where one mask changes, so many are looked at again."""

_SPLITS_TO_WALK = 5
"""After so many splits of a chain it is seen whether to go on bisecting."""

_LOG_SLACK = 1024
"""Logs up to this many hashes above twice what is held are left alone."""


Group = tuple[int, tuple[str, ...]]
"""(Leading blocks, the workers that hold exactly so many.)"""


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
        self._walked: dict[BlockHash, tuple[list[int], list[Group]]] = {}
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

    def leading(self, chain: Sequence[BlockHash]) -> list[Group]:
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
        groups: list[Group] = []
        whole = everyone & last
        if whole:
            groups.append((len(chain), self._workers(whole)))
            everyone ^= whole
        # Each entry: these workers hold at least `low` and fewer than `high` leading blocks. Splits add to it.
        spans = [(everyone, 1, len(chain))]
        probes = 0
        for mask, low, high in spans:
            # Seven of eight probes found another set of holders: hardly a block will be spared by bisecting.
            dense = len(spans) > _SPLITS_TO_WALK and len(spans) * 8 > probes * 7
            if dense and self._walk(chain, mask, low, high, groups):
                continue
            while high - low > 1:
                middle = (low + high) >> 1
                probes += 1
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

    def _walk(self, chain: Sequence[BlockHash], mask: int, low: int, high: int, groups: list[Group]) -> bool:
        """Add the groups of the workers in `mask`, which hold `low` blocks and not `high`, block by block.

        False, and nothing is added: somebody holds a block and not its parent, as may be for a moment while a set is
        loaded; then the masks alone do not say who left.
        """
        masks = list(map(self.holders.get, chain[low - 1 : high], repeat(0)))
        if masks[0] ^ masks[-1] != mask:
            return False
        found: list[Group] = []
        start = low
        while start < high:
            end = min(start - start % _STRETCH_BLOCKS + _STRETCH_BLOCKS, high)
            stretch = masks[start - low : end - low + 1]
            last = chain[end - 1]  # Its hash stands for all blocks before it too.
            known = self._walked.get(last)
            if known is None or known[0] != stretch:
                left = self._left(stretch, start)
                if left is None:
                    return False
                known = self._walked[last] = stretch, left
            found += known[1]
            start = end
        groups += found
        return True

    def _left(self, masks: Sequence[int], length: int) -> list[Group] | None:
        """Who leaves from each mask to the next, the first after `length` blocks. None: somebody comes."""
        groups: list[Group] = []
        for above, holders in pairwise(masks):
            if above != holders:
                if above & holders != holders:
                    return None
                groups.append((length, self._workers(above ^ holders)))
            length += 1
        if self._expanded_bytes > _EXPANDED_BYTES:
            self._forget_expanded()
        self._expanded_bytes += _EXPANDED_ENTRY_BYTES * len(masks)
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
        self._walked.clear()
        self._expanded_bytes = 0


def _bits(mask: int) -> list[int]:
    """Positions of the set bits, ascending. From the top, so that the integer becomes shorter."""
    positions = []
    while mask:
        top = mask.bit_length() - 1
        positions.append(top)
        mask ^= 1 << top
    positions.reverse()
    return positions
