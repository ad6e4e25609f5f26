"""Deficit round robin: whose turn it is, in tokens.

Each of those that wait has a *deficit*. While it is above 0 it is its turn; what it starts is taken off in full (so it
may go below 0), and once nobody is above 0 a round passes: everybody gets a quantum times its weight. So over time the
starts of those that always wait are, in tokens, as their weights, and two of equal weight are never further apart than
a quantum and the largest request of each. (Shreedhar and Varghese's deficit round robin in its surplus form, which
need not know a cost before.) Everybody's turn comes after finitely many rounds.

Who waits no more keeps what it owes while others wait: else a tenant that sends one request at a time would always
be first. When nobody waits, all is forgotten.

Pure, used from one thread. Owned by a `WaitingLine`; a `Cursor` looks ahead without changing anything.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

KEPT = 1024
"""So many of those that wait no more are remembered."""

H = TypeVar("H", bound=Hashable)


@dataclass(slots=True, eq=False)
class _Share:
    deficit: float
    """Tokens, as of `round`."""
    round: int
    quantum: float
    rank: float
    place: int
    """In the ring: of those whose turn comes in the same round, the least rank and then the least place goes first."""
    waiting: bool


class Turns(Generic[H]):
    """See the module."""

    def __init__(self, quantum_tokens: int) -> None:
        self._quantum = float(quantum_tokens)
        self._shares: dict[H, _Share] = {}
        self._waiting = 0
        self._round = 0
        self._places = itertools.count()

    def join(self, key: H, weight: float = 1.0) -> None:
        """It has something that waits. Idempotent. In a round, those of more weight have their turn first."""
        share = self._shares.get(key)
        if share is None:
            quantum = self._quantum * weight
            share = self._shares[key] = _Share(quantum, self._round, quantum, -weight, next(self._places), False)
        if not share.waiting:
            share.waiting = True
            share.place = next(self._places)
            self._waiting += 1

    def leave(self, key: H) -> None:
        """Nothing of it waits any more. Idempotent."""
        share = self._shares.get(key)
        if share is None or not share.waiting:
            return
        share.waiting = False
        self._waiting -= 1
        if not self._waiting:
            self._shares.clear()
            self._round = 0
        elif len(self._shares) - self._waiting > KEPT:
            self._forget()

    def charge(self, key: H, tokens: float) -> None:
        """It started something of so many tokens; negative: that came to nothing.

        It owes at most what it just started (and a quantum): it may have gone ahead of others whose turn it was because
        what they wait for was not free, and did not hold them up.
        """
        share = self._shares.get(key)
        if share is None:
            return
        deficit = self._deficit(share) - tokens
        share.deficit = min(share.quantum, max(deficit, -max(tokens, share.quantum)))
        share.round = self._round
        if share.deficit <= 0.0:
            share.place = next(self._places)

    def cursor(self) -> Cursor[H]:
        """The order as of now. Rounds that nobody's turn falls into pass."""
        due = [
            (_rounds(self._deficit(share), share.quantum), share.rank, share.place, key)
            for key, share in self._shares.items()
            if share.waiting
        ]
        if due and (passed := min(rounds for rounds, _, _, _ in due)):
            self._round += passed
            due = [(rounds - passed, rank, place, key) for rounds, rank, place, key in due]
        deficits = {key: (self._deficit(self._shares[key]), self._shares[key].quantum) for _, _, _, key in due}
        return Cursor(due, deficits)

    def _deficit(self, share: _Share) -> float:
        return min(share.quantum, share.deficit + (self._round - share.round) * share.quantum)

    def _forget(self) -> None:
        """Those that owe nothing, then those that owe least, until half of the room is free."""
        gone = sorted(
            (key for key, share in self._shares.items() if not share.waiting),
            key=lambda key: self._deficit(self._shares[key]),
            reverse=True,
        )
        for key in gone[: len(gone) - KEPT // 2]:
            del self._shares[key]


class Cursor(Generic[H]):
    """The turns to come, if everything that is asked for starts: `first`, then `spend` or `drop`, and again."""

    def __init__(self, due: list[tuple[int, float, int, H]], deficits: dict[H, tuple[float, float]]) -> None:
        # (rounds until its turn, rank, place, key); a place is never the same twice, so keys are not compared.
        self._due = due
        heapq.heapify(due)
        self._shares = {key: (deficit, quantum, 0) for key, (deficit, quantum) in deficits.items()}
        """Deficit, quantum, and the round that the deficit is as of."""
        self._places = itertools.count(1 + max((place for _, _, place, _ in due), default=0))

    def first(self) -> H | None:
        """Whose turn it is; None: nobody is left."""
        return self._due[0][3] if self._due else None

    def spend(self, tokens: float) -> None:
        """The first one used so much of its turn."""
        rounds, rank, _, key = self._due[0]
        deficit, quantum, since = self._shares[key]
        deficit += (rounds - since) * quantum - tokens
        self._shares[key] = (deficit, quantum, rounds)
        if deficit <= 0.0:
            heapq.heapreplace(self._due, (rounds + _rounds(deficit, quantum), rank, next(self._places), key))

    def drop(self) -> None:
        """The first one has nothing more."""
        heapq.heappop(self._due)


def _rounds(deficit: float, quantum: float) -> int:
    """After how many rounds it is above 0."""
    return 0 if deficit > 0.0 else math.floor(-deficit / quantum) + 1
