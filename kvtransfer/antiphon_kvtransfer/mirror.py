"""A gateway's copy of the block index: which worker holds which KV blocks. No I/O.

The question it answers is "for this chain, how many leading blocks does each worker hold", for a thousand workers,
on the way of every request; `_holders.py` says how. This module says *whose* contents count: they belong to an
(incarnation, sequence). A delta counts only if it continues exactly there; otherwise it is stale (ignored) or a gap
(the reader must load the worker anew). Memory is bounded by `max_blocks` held in all: a worker whose news no longer
fits keeps its closed subset, shrinking, until it is loaded anew (`incomplete`).

Answers are hints for routing: whoever pulls a block still asks its holder to pin it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from antiphon_kvtransfer._holders import Holders, Holding
from antiphon_kvtransfer.identity import BlockHash

BlocksSeen = Callable[[str, Sequence[BlockHash]], None]
"""Called with a model and blocks of it, while a delta is applied. It must not call the mirror."""


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
class _Known:
    """What is known of one worker's set, and up to where."""

    holding: Holding
    position: Position
    complete: bool = True


class _ModelMirror(Holders):
    def __init__(self) -> None:
        super().__init__()
        self.workers: dict[str, _Known] = {}


class BlockMirror:
    """See the module's docstring. Used from one thread."""

    def __init__(self, max_blocks: int = 2_000_000) -> None:
        """`max_blocks`: (worker, block) pairs kept in all. A block costs about 110 bytes, each pair 16 to 32 more."""
        self._max_blocks = max_blocks
        self._models: dict[str, _ModelMirror] = {}
        self.blocks = 0
        """(worker, block) pairs held now."""
        self.on_last_removed: BlocksSeen | None = None
        """Told of blocks that the last worker that held them has evicted (not of what went with a worker)."""
        self.on_stored: BlocksSeen | None = None
        """Told of blocks that a worker has stored (not of what it held already when it was loaded)."""

    # -- questions

    def leading_blocks(self, model: str, chain: Sequence[BlockHash]) -> dict[str, int]:
        """Leading blocks of `chain` that each worker holds; workers that hold none are left out."""
        groups = self.leading_groups(model, chain)
        if not groups:
            return {}
        length, workers = groups[0]
        lengths = dict.fromkeys(workers, length)
        for length, workers in groups[1:]:
            for worker_id in workers:
                lengths[worker_id] = length
        return lengths

    def leading_groups(self, model: str, chain: Sequence[BlockHash]) -> Sequence[tuple[int, tuple[str, ...]]]:
        """As `leading_blocks`, by length: (leading blocks held, workers that hold exactly so many).

        Each worker is in one group, lengths are distinct, in no order. Costs as much as there are groups, not as
        there are workers: the tuples are kept, so a prefix that a thousand workers hold is one entry made beforehand.
        """
        mirror = self._models.get(model)
        return mirror.leading(chain) if mirror else ()

    def contents(self, model: str, worker_id: str) -> frozenset[BlockHash]:
        """All blocks the worker holds, as far as known here."""
        known = self._known(model, worker_id)
        return self._models[model].held(known.holding) if known else frozenset()

    def position(self, model: str, worker_id: str) -> Position | None:
        """Up to where the worker's set is known; None when nothing is."""
        known = self._known(model, worker_id)
        return known.position if known else None

    def incomplete(self, model: str) -> tuple[str, ...]:
        """Workers whose sets did not fit. Empty while `max_blocks` still leaves too little room to try again."""
        if self.blocks > self._max_blocks * 3 // 4 or model not in self._models:
            return ()
        return tuple(worker for worker, known in self._models[model].workers.items() if not known.complete)

    # -- changes

    def load(self, model: str, worker_id: str, position: Position, hashes: Sequence[BlockHash]) -> None:
        """Replace what is known of the worker by its whole set at `position`."""
        self.forget(model, worker_id)
        mirror = self._models.setdefault(model, _ModelMirror())
        known = mirror.workers[worker_id] = _Known(mirror.open(worker_id), position)
        if self.blocks + len(hashes) > self._max_blocks:
            known.complete = False
            return
        mirror.add(known.holding, hashes)
        self.blocks += known.holding.count

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
        known = self._known(model, worker_id)
        if known is None or known.position.incarnation != incarnation:
            return Applied.GAP
        if sequence <= known.position.sequence:
            return Applied.STALE
        if previous != known.position.sequence:
            return Applied.GAP
        mirror, holding = self._models[model], known.holding
        before = holding.count
        gone = mirror.remove(holding, removed)
        if known.complete and self.blocks - before + holding.count + len(stored) > self._max_blocks:
            known.complete = False
        if known.complete:
            mirror.add(holding, stored)
        self.blocks += holding.count - before
        known.position = Position(incarnation, sequence)
        if gone and self.on_last_removed is not None:
            self.on_last_removed(model, gone)
        if stored and self.on_stored is not None:
            self.on_stored(model, stored)
        return Applied.APPLIED

    def forget(self, model: str, worker_id: str) -> None:
        """Nothing is known of the worker any more. Unknown ones are ignored."""
        mirror = self._models.get(model)
        known = mirror.workers.pop(worker_id, None) if mirror else None
        if mirror is not None and known is not None:
            self.blocks -= known.holding.count
            mirror.close(known.holding)

    def forget_model(self, model: str) -> None:
        mirror = self._models.pop(model, None)
        if mirror is not None:
            self.blocks -= sum(known.holding.count for known in mirror.workers.values())

    def _known(self, model: str, worker_id: str) -> _Known | None:
        mirror = self._models.get(model)
        return mirror.workers.get(worker_id) if mirror else None
