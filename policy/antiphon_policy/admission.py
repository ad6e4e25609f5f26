"""The waiting line: what waits for a worker, and in which order it is looked at. Used by gateway and simulator.

    priority classes    deficit round robin by weight (`turns`)    nobody starves, high first in each round
      tenants           deficit round robin, equal shares          a tenant that floods waits for itself
        requests        1. passed over too often, by arrival       nobody starves
                        2. at risk of their deadline: earliest deadline first
                        3. longest matched prefix first            SGLang's Theorem 3.1: equals the depth-first order
                        4. too late for their deadline, by arrival

All shares are in uncached prompt tokens, never in requests. A request is *at risk* if it would miss its deadline were
it served last of all that waits now, and behind the longest of them once more, which nobody takes back once it has
started; so a short line goes by prefix, and the longer it grows the more goes by deadline. One that would miss it even
if it started now is *too late*: it goes after those that can still make theirs.

Nobody is passed over for ever, and the bound is in tokens too: of one tenant and class, a request goes first once
later ones have started `OVERTAKEN` (`OVERTAKEN_LATE` if it is too late) times the tokens that waited before it when it
came. So while the workers cannot do all, those that are too late get about 1 / `OVERTAKEN_LATE` of the tokens.

`pass_over` looks at them in that order. The caller says of each whether it starts or is held (`holding`), and counts
what is held into the figures that the next one is judged by. A held request does not hold up those behind it, which may
want another worker. Pure: time comes from outside, keys are opaque. Used from one thread.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from antiphon_policy.latency import CHUNK_TOKENS
from antiphon_policy.turns import Cursor, Turns

OVERTAKEN = 1.0
OVERTAKEN_LATE = 16.0

K = TypeVar("K", bound=Hashable)


class Priority(enum.IntEnum):
    """The value is the share that the class gets of the tokens while several of them wait."""

    LOW = 1
    NORMAL = 4
    HIGH = 16


class Order(enum.Enum):
    """Within one tenant and class."""

    DEADLINE_THEN_PREFIX = "deadline_then_prefix"
    ARRIVAL = "arrival"
    """To measure against."""


class Verdict(enum.Enum):
    """What becomes of a request that was looked at."""

    START = "start"
    HOLD = "hold"
    """It keeps its place."""
    LEAVE = "leave"
    """It waits here no more, and did not start."""
    STOP = "stop"
    """It keeps its place, and nothing behind it can start either: the pass ends."""


@dataclass(slots=True, eq=False)
class Entry(Generic[K]):
    """One request. Estimates (`uncached_tokens`, `matched_tokens`, `service_ms`) may be set anew at any look."""

    key: K
    arrived_ms: float
    uncached_tokens: int
    """Prompt tokens to compute where it goes."""
    tenant: str = ""
    priority: Priority = Priority.NORMAL
    matched_tokens: int = 0
    """Prompt tokens that the best worker holds already."""
    service_ms: float = 0.0
    """To its first token, if it started now."""
    due_ms: float | None = None
    """When its first token is due; None: no promise."""
    place: int = 0
    """By arrival in the line, kept when it comes back; 0: not given yet."""
    # The line's own.
    counted_tokens: int = field(default=0, init=False)
    charged_tokens: int = field(default=0, init=False)
    ahead_tokens: int = field(default=0, init=False)
    started_before: int = field(default=-1, init=False)


class _Flow(Generic[K]):
    """What waits of one tenant in one class."""

    def __init__(self) -> None:
        self.entries: dict[K, Entry[K]] = {}
        self.tokens = 0
        self.started_tokens = 0
        """Of all that ever started here."""

    def ranked(self, now_ms: float, drain_ms: float, quantum_tokens: int, order: Order) -> Iterator[Entry[K]]:
        """The entries in order; those that come or go meanwhile are not seen. O(n), and O(log n) for each taken."""
        if order is Order.ARRIVAL:
            heap = [(0, 0.0, entry.place, at, entry) for at, entry in enumerate(self.entries.values())]
        else:
            heap = [
                (*self._rank(entry, now_ms, drain_ms, quantum_tokens), entry.place, at, entry)
                for at, entry in enumerate(self.entries.values())
            ]
        heapq.heapify(heap)
        while heap:
            yield heapq.heappop(heap)[4]

    def _rank(self, entry: Entry[K], now_ms: float, drain_ms: float, quantum_tokens: int) -> tuple[int, float]:
        """(group, what it is ordered by within it), both ascending."""
        due_ms = entry.due_ms
        slack_ms = float("inf") if due_ms is None else due_ms - now_ms - entry.service_ms
        # What started since it came is what waited before it, and what overtook it.
        overtaken = self.started_tokens - entry.started_before - entry.ahead_tokens
        if overtaken > 0:
            times = OVERTAKEN if slack_ms >= 0.0 else OVERTAKEN_LATE
            if overtaken > times * (entry.ahead_tokens + quantum_tokens):
                return 0, 0.0
        if slack_ms < 0.0:
            return 3, 0.0
        if due_ms is not None and slack_ms <= drain_ms:
            return 1, due_ms
        return 2, -float(entry.matched_tokens)


def _place(entry: Entry[K]) -> int:
    return entry.place


class WaitingLine(Generic[K]):
    """See the module."""

    def __init__(self, *, quantum_tokens: int = CHUNK_TOKENS, order: Order = Order.DEADLINE_THEN_PREFIX) -> None:
        """`quantum_tokens`: what a tenant may start in a turn; of the order of a prompt, its size hardly matters."""
        self._quantum = quantum_tokens
        self._order = order
        self._flows: dict[Priority, dict[str, _Flow[K]]] = {}
        self._classes: Turns[Priority] = Turns(quantum_tokens)
        self._tenants: dict[Priority, Turns[str]] = {}
        self._entries: dict[K, Entry[K]] = {}
        self._places = itertools.count(1)
        self.waiting_tokens = 0
        """Uncached ones of all entries, by their estimates."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry[K]]:
        return iter(list(self._entries.values()))

    def entry(self, key: K) -> Entry[K] | None:
        return self._entries.get(key)

    def ahead_of(self, entry: Entry[K]) -> int:
        """Tokens that start before it, were it the last of its tenant and class and the others kept coming."""
        flow = self._flows[entry.priority][entry.tenant]
        others = self.waiting_tokens - flow.tokens
        own = flow.tokens - entry.counted_tokens
        # While its own are served, the others get this many times as much.
        classes = sum(self._flows) / entry.priority
        times = classes * len(self._flows[entry.priority]) - 1.0
        return own + min(others, int(times * flow.tokens))

    def crowding(self, room_entries: int, room_tokens: int) -> tuple[float, Entry[K]] | None:
        """Who takes most of that room for the weight of its class: (its share, the newest of its entries)."""
        most: tuple[float, Entry[K]] | None = None
        for priority, flows in self._flows.items():
            for flow in flows.values():
                share = max(len(flow.entries) / max(1, room_entries), flow.tokens / max(1, room_tokens)) / priority
                if most is None or share > most[0]:
                    most = (share, max(flow.entries.values(), key=_place))
        return most

    def add(self, entry: Entry[K]) -> None:
        """It waits from now on. One that started and comes back (nobody took it after all) takes the place that it
        had, and its tenant gets back what that cost it."""
        if entry.key in self._entries:
            raise ValueError("the entry waits already")
        flow = self._flows.setdefault(entry.priority, {}).get(entry.tenant)
        if flow is None:
            flow = self._flows[entry.priority][entry.tenant] = _Flow()
        tenants = self._tenants.get(entry.priority)
        if tenants is None:
            tenants = self._tenants[entry.priority] = Turns(self._quantum)
        self._classes.join(entry.priority, entry.priority)
        tenants.join(entry.tenant)
        if entry.charged_tokens:
            self._classes.charge(entry.priority, -entry.charged_tokens)
            tenants.charge(entry.tenant, -entry.charged_tokens)
            entry.charged_tokens = 0
        if not entry.place:
            entry.place = next(self._places)
        if entry.started_before < 0:
            entry.ahead_tokens = flow.tokens
            entry.started_before = flow.started_tokens
        # A flow that was empty meanwhile counts from 0 again.
        entry.started_before = min(entry.started_before, flow.started_tokens)
        flow.entries[entry.key] = entry
        entry.counted_tokens = 0
        self._entries[entry.key] = entry
        self.estimate(entry, entry.uncached_tokens)

    def estimate(self, entry: Entry[K], uncached_tokens: int) -> None:
        """A new estimate of what it costs."""
        entry.uncached_tokens = uncached_tokens
        if entry.key in self._entries:
            change = max(1, uncached_tokens) - entry.counted_tokens
            entry.counted_tokens += change
            self._flows[entry.priority][entry.tenant].tokens += change
            self.waiting_tokens += change

    def remove(self, key: K) -> Entry[K] | None:
        """It waits no more; None: it did not wait."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        flows = self._flows[entry.priority]
        flow = flows[entry.tenant]
        del flow.entries[key]
        flow.tokens -= entry.counted_tokens
        self.waiting_tokens -= entry.counted_tokens
        if not flow.entries:
            del flows[entry.tenant]
            self._tenants[entry.priority].leave(entry.tenant)
            if not flows:
                del self._flows[entry.priority]
                self._classes.leave(entry.priority)
        return entry

    def pass_over(
        self,
        now_ms: float,
        choose: Callable[[Entry[K]], Verdict],
        *,
        tokens_per_ms: float = 0.0,
        max_held: int | None = None,
    ) -> Iterator[Entry[K]]:
        """Look at what waits, in turn, and give out what starts. What is not taken from the iterator was not looked at.

        `choose` may set the entry's estimates: what it starts with is what its tenant is charged. `tokens_per_ms`: what
        all workers together compute, for who is at risk (0: not known, nobody is but by its own time). The pass ends
        once `max_held` were held.
        """
        drain_ms = self.waiting_tokens / tokens_per_ms if tokens_per_ms > 0.0 else 0.0
        # And the longest may just have been started before it: nothing is taken back.
        drain_ms += max((entry.service_ms for entry in self._entries.values()), default=0.0)
        classes = self._classes.cursor()
        cursors: dict[Priority, Cursor[str]] = {}
        rankings: dict[tuple[Priority, str], Iterator[Entry[K]]] = {}
        held = 0
        while (priority := classes.first()) is not None:
            tenants = cursors.get(priority)
            if tenants is None:
                tenants = cursors[priority] = self._tenants[priority].cursor()
            tenant = tenants.first()
            if tenant is None:
                classes.drop()
                continue
            ranking = rankings.get((priority, tenant))
            if ranking is None:
                flow = self._flows.get(priority, {}).get(tenant)
                ranking = iter(()) if flow is None else flow.ranked(now_ms, drain_ms, self._quantum, self._order)
                rankings[priority, tenant] = ranking
            entry = next(ranking, None)
            if entry is None:
                tenants.drop()
                continue
            if self._entries.get(entry.key) is not entry:
                continue
            verdict = choose(entry)
            if verdict is Verdict.STOP:
                return
            # Whatever becomes of it, this was its turn: those behind are looked at as if it had started.
            tokens = max(1, entry.uncached_tokens)
            tenants.spend(tokens)
            classes.spend(tokens)
            if verdict is Verdict.START:
                self._start(entry, tokens)
                yield entry
            elif verdict is Verdict.LEAVE:
                self.remove(entry.key)
            else:
                held += 1
                if held == max_held:
                    return

    def _start(self, entry: Entry[K], tokens: int) -> None:
        self.estimate(entry, entry.uncached_tokens)
        entry.charged_tokens = tokens
        self._flows[entry.priority][entry.tenant].started_tokens += tokens
        self._tenants[entry.priority].charge(entry.tenant, tokens)
        self._classes.charge(entry.priority, tokens)
        self.remove(entry.key)
