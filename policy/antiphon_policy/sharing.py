"""Several gateways, one fleet: whose turn it is to fill a worker's room. Pure.

Each gateway has a line of its own, but all fill the same room. They hear of it with the same report of the worker, and
of what another one sent there only with the next. Left alone they fill it twice, and what can wait goes before what
cannot, because that waits elsewhere.

So a gateway tells a worker that may soon have room what it keeps back (`Kept`: how much, and its most urgent request),
and the worker's report tells all gateways. From one report all conclude the same: whose request is more urgent goes
first, and the others leave the room to it. What a report does not say yet counts for nothing, as the others cannot know
it. Room that nobody has taken after `NEWS_MS` for each that goes first (it wants another worker, it is gone) is taken:
by then it would be known. So nothing said here, however old or wrong, costs anybody more than that; and a gateway that
is alone, or whose others keep nothing back, leaves nothing. Nor does one that has left `OVERTAKEN_LATE` rooms in a row.

What waits elsewhere counts also in what all that waits will take: for who is at risk of a deadline (`admission`), and
for who will wait behind a request (`pricing`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from antiphon_policy.admission import OVERTAKEN_LATE, Entry, Priority, WaitingLine

NEWS_MS = 35.0
"""What a worker was sent its reports say 30 ms later at the latest; both ways take a little."""

NEAR_HORIZONS = 2.0
"""A worker that has less to do than so many of its horizons (`holding`) may soon have room: it is told what waits."""

Urgency = tuple[int, bool, float, float]
"""Class, whether it is too late, when it is due, when it came: the least is the most urgent."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What one gateway keeps back, and of its highest class the most urgent request. Times by the reader's clock."""

    tokens: int = 0
    """Uncached prompt tokens in its line; 0: nothing waits."""
    priority: int = Priority.LOW
    due_ms: float | None = None
    service_ms: float = 0.0
    arrived_ms: float = 0.0


NOTHING = Kept()


def kept_back(line: WaitingLine[Any], now_ms: float) -> Kept:
    """What to tell the others of. O(n)."""
    first = min(line, key=lambda entry: urgency(entry, now_ms), default=None)
    return NOTHING if first is None else _of(first, line.waiting_tokens)


def urgency(one: Kept | Entry[Any], now_ms: float) -> Urgency:
    due_ms = one.due_ms
    if due_ms is None:
        return -one.priority, False, math.inf, one.arrived_ms
    return -one.priority, due_ms - one.service_ms < now_ms, due_ms, one.arrived_ms


def _of(entry: Entry[Any], tokens: int) -> Kept:
    return Kept(tokens, entry.priority, entry.due_ms, entry.service_ms, entry.arrived_ms)


@dataclass(frozen=True, slots=True)
class _Heard:
    kept: Kept
    said_ms: float
    by: str


class SharedRoom:
    """What gateways keep back, as workers report it. One for each line. Names of gateways are opaque."""

    def __init__(self, gateway: str) -> None:
        """`gateway`: the one that this is for."""
        self._gateway = gateway
        self._kept: dict[str, Mapping[str, Kept]] = {}
        """Worker -> gateway -> what that keeps back; only workers that report anything."""
        self._latest: dict[str, _Heard] = {}
        """The others, by the worker that heard from them last."""
        self._left: dict[str, tuple[float, float]] = {}
        """Workers whose room is left to others: since when, and when that was last asked for."""
        self._in_a_row = 0
        """Rooms that were left to others and taken by them since this gateway sent anything."""
        self._told: dict[str, Kept] = {}

    @property
    def others_tokens(self) -> int:
        """Uncached prompt tokens that wait at other gateways."""
        return sum([heard.kept.tokens for heard in self._latest.values()]) if self._latest else 0

    def hear(self, worker_id: str, said: Mapping[str, tuple[Kept, float]]) -> bool:
        """A worker's report: by gateway what it keeps back, and when it said so. Whether that is news."""
        kept = {gateway: one for gateway, (one, _) in said.items() if one.tokens}
        news = kept != self._kept.get(worker_id, {})
        if kept:
            self._kept[worker_id] = kept
        else:
            self._kept.pop(worker_id, None)
        if self._latest:
            self._latest = {
                gateway: heard for gateway, heard in self._latest.items() if heard.by != worker_id or gateway in said
            }
        for gateway, (one, said_ms) in said.items():
            known = self._latest.get(gateway)
            if gateway != self._gateway and (known is None or said_ms >= known.said_ms):
                self._latest[gateway] = _Heard(one, said_ms, worker_id)
        return news

    def forget(self, worker_id: str) -> None:
        """It is there no more."""
        self.hear(worker_id, {})
        self._left.pop(worker_id, None)
        self._told.pop(worker_id, None)

    def leaves_ms(self, worker_id: str, entry: Entry[Any], now_ms: float) -> float:
        """For how long that room is left to others though the request might have it; 0: it is taken."""
        kept = self._kept.get(worker_id)
        if not kept:
            return 0.0
        own = kept.get(self._gateway)
        if own is None:
            before = len(kept)
        else:
            mine = (max(urgency(entry, now_ms), urgency(own, now_ms)), self._gateway)
            before = sum((urgency(one, now_ms), gateway) < mine for gateway, one in kept.items() if one is not own)
        if not before or self._in_a_row >= OVERTAKEN_LATE:
            return 0.0
        since, _ = self._left.get(worker_id, (now_ms, now_ms))
        self._left[worker_id] = (since, now_ms)
        return max(0.0, since + before * NEWS_MS - now_ms)

    def is_left(self, worker_id: str) -> bool:
        """Whether its room is left to others now."""
        return worker_id in self._left

    def sent(self, worker_id: str) -> None:
        """A request of this gateway goes there: the next room is left anew."""
        self._in_a_row = 0
        self._left.pop(worker_id, None)

    def full(self, worker_id: str, now_ms: float) -> None:
        """It has no room, so somebody took it. Not where its room was left just now: what is full then is the place
        that is reserved for whom it was left by."""
        if worker_id in self._left and self._left[worker_id][1] < now_ms:
            del self._left[worker_id]
            self._in_a_row += 1

    def is_news(self, worker_id: str, kept: Kept) -> bool:
        """Whether the worker has to be told. It counts as told then."""
        if kept == self._told.get(worker_id, NOTHING):
            return False
        if kept.tokens:
            self._told[worker_id] = kept
        else:
            del self._told[worker_id]
        return True
