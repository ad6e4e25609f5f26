"""The work queue: keys of Models to look at, each at most once in it and by one worker at a time.

    add ──▶ due ──▶ a worker ──▶ look again after ...   (the plan said so)
     ▲                 │
     └── back-off ◀────┘ failed

A key that is added while it is being worked on is looked at once more afterwards. Keys come out in the order in which
they became due, so 300 Models at once share the workers fairly. A failing key waits longer each time, with jitter;
news about it shortens the wait, but to no less than a second. As keys are never twice in it, the queue is never longer
than there are Models.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

log = logging.getLogger("antiphon.operator.queue")

_NEWS_WHILE_FAILING_S = 1.0
_LONGEST_TIMER_S = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a key that failed waits: `first_s`, then twice as long each time up to `longest_s`."""

    first_s: float = 0.5
    longest_s: float = 60.0

    def delay_s(self, failures: int, chance: float) -> float:
        """Of the failure number `failures` (from 1); `chance` in [0, 1) spreads it over the upper half."""
        whole = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return whole * (0.5 + chance / 2)


class WorkFailedError(Exception):
    """Raised by the work to say how to back off. It has told what happened where people look."""

    def __init__(self, message: str, backoff: Backoff) -> None:
        super().__init__(message)
        self.backoff = backoff


Work = Callable[[str], Awaitable[float | None]]
"""Looks at one key. Answers after how many seconds to look again; None: only when something happens."""


class WorkQueue:
    """See the module's docstring. Owned by the process; `run` ends when it is cancelled."""

    def __init__(self, *, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._due: asyncio.Queue[str] = asyncio.Queue()
        self._queued: set[str] = set()
        self._working: set[str] = set()
        self._again: set[str] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._failures: dict[str, int] = {}

    def add(self, key: str) -> None:
        """Look at it as soon as a worker is free."""
        if self._failures.get(key) and key in self._timers:
            self.add_after(key, _NEWS_WHILE_FAILING_S)
        elif key in self._working:
            self._again.add(key)
        elif key not in self._queued:
            self._drop_timer(key)
            self._queued.add(key)
            self._due.put_nowait(key)

    def add_after(self, key: str, after_s: float) -> None:
        """Look at it in `after_s` seconds, or before if something happens. Of two such times, the earlier counts."""
        loop = asyncio.get_running_loop()
        at = loop.time() + min(max(after_s, 0.0), _LONGEST_TIMER_S)
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= at:
            return
        self._drop_timer(key)
        self._timers[key] = loop.call_at(at, self._elapsed, key)

    def forget(self, key: str) -> None:
        """Drop what is planned for it. Work that has begun goes on."""
        self._drop_timer(key)
        self._failures.pop(key, None)
        self._again.discard(key)

    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._queued)

    def busy(self) -> int:
        return len(self._working)

    def planned(self) -> dict[str, float]:
        """Keys that wait for their time, with the seconds until then."""
        now = asyncio.get_running_loop().time()
        return {key: timer.when() - now for key, timer in self._timers.items()}

    async def run(self, work: Work, workers: int) -> None:
        """Work on keys until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(self._worker(work), name=f"reconciler {number}")

    def close(self) -> None:
        for key in tuple(self._timers):
            self._drop_timer(key)

    async def _worker(self, work: Work) -> None:
        while True:
            key = await self._due.get()
            # A look at a settled Model waits for nothing: between looks, watches and pages have their turn.
            await asyncio.sleep(0)
            self._queued.discard(key)
            self._working.add(key)
            self._drop_timer(key)
            after_s: float | None = None
            try:
                after_s = await work(key)
                self._failures.pop(key, None)
            except WorkFailedError as failure:
                after_s = self._backoff_s(key, failure.backoff)
                log.warning("%s: %s; looking again in %.1f s", key, failure, after_s)
            except Exception:
                after_s = self._backoff_s(key, Backoff())
                log.exception("%s: this should not have happened; looking again in %.1f s", key, after_s)
            finally:
                self._working.discard(key)
            if after_s is not None:
                self.add_after(key, after_s)
            if key in self._again:
                self._again.discard(key)
                self.add(key)

    def _backoff_s(self, key: str, backoff: Backoff) -> float:
        self._failures[key] = self._failures.get(key, 0) + 1
        return backoff.delay_s(self._failures[key], self._chance())

    def _elapsed(self, key: str) -> None:
        del self._timers[key]
        self.add(key)

    def _drop_timer(self, key: str) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
