"""How often a block that left the last cache that held it is wanted again: what evicting one costs, in expectation.

Routing prices the recompute that a placement causes. Pushing out a block nobody asks for again costs nothing; pushing
out a turn of a live conversation costs its prefill. This is the one figure between the two, learnt from what happens.
Fed by the block mirror (`BlockMirror.on_last_removed`, `on_stored`) and by routing (`asked`). No I/O, no clock.

The one idea: remember the last `max_blocks` evicted hashes, no contents (a *ghost*). A block found among them is wanted
again: `reuse` is the share of evicted blocks that come back so, over the recent past. A block counts once per
eviction: when this gateway's request asks for it, or when a worker stores it because another gateway's did.
Wanted later than the ghost remembers is not "soon", and does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon_kvtransfer.identity import BlockHash

PRIOR_REUSE = 0.2
"""While nothing is known: the middle of the replays of `benchmarks/index/reuse.py`, which go from 0.01 to 0.83."""

PRIOR_BLOCKS = 64
"""The prior counts as much as so many evicted blocks."""


class EvictionGhost:
    """Of one model. Two generations of hashes: the younger fills, then the older is forgotten whole."""

    def __init__(self, max_blocks: int = 200_000, *, prior: float = PRIOR_REUSE) -> None:
        """`max_blocks`: evicted hashes remembered at most (at least half as many once full), at about 100 bytes each.

        The evictions of the last `max_blocks / 2` weigh as much as all before them. Raises ValueError.
        """
        if max_blocks < 2 or not 0 <= prior <= 1:
            raise ValueError(
                f"max_blocks={max_blocks} prior={prior}: remember 2 blocks or more, with a prior within 0 to 1"
            )
        self._generation_blocks = max_blocks // 2
        self._keep = 0.5 ** (1 / self._generation_blocks)
        self._younger: set[BlockHash] = set()
        self._older: set[BlockHash] = set()
        self._evicted = 0.0
        self._returned = 0.0
        self._prior = prior

    @property
    def reuse(self) -> float:
        """Share of recently evicted blocks that were wanted again, in [0, 1]; the prior while nothing is known."""
        share = (self._returned + self._prior * PRIOR_BLOCKS) / (self._evicted + PRIOR_BLOCKS)
        return min(1.0, share)

    @property
    def blocks(self) -> int:
        """Hashes remembered now."""
        return len(self._younger) + len(self._older)

    def evicted(self, hashes: Sequence[BlockHash]) -> None:
        """The last worker that held these has evicted them."""
        keep = self._keep ** len(hashes)
        self._evicted = self._evicted * keep + len(hashes)
        self._returned *= keep
        for start in range(0, len(hashes), self._generation_blocks):
            part = hashes[start : start + self._generation_blocks]
            if len(self._younger) + len(part) > self._generation_blocks:
                self._older, self._younger = self._younger, set()
            self._older.difference_update(part)
            self._younger.update(part)

    def asked(self, chain: Sequence[BlockHash], known_blocks: int) -> int:
        """A request wants `chain`, whose `known_blocks` leading ones are held: how many after them were evicted.

        Those have returned, and are forgotten here.
        """
        found = 0
        for block in chain[known_blocks:]:
            if not self._take(block):
                break
            found += 1
        self._returned += found
        return found

    def stored(self, hashes: Sequence[BlockHash]) -> int:
        """A worker holds these now: how many of them had been evicted, and were not asked for here since."""
        found = 0
        for generation in (self._younger, self._older):
            if generation and (returned := generation.intersection(hashes)):
                generation -= returned
                found += len(returned)
        self._returned += found
        return found

    def _take(self, block: BlockHash) -> bool:
        for generation in (self._younger, self._older):
            if block in generation:
                generation.remove(block)
                return True
        return False
