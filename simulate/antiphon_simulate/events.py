"""Simulated time: what happens next.

Events at the same time happen in the order in which they were asked for, so a run is the same each time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, TypeVarTuple

Happens = TypeVarTuple("Happens")


class Events:
    """Owns the clock. `now_ms` moves only in `run`."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, time_ms: float, what: Callable[[*Happens], object], *arguments: *Happens) -> None:
        """`what(*arguments)` happens then; now, if that is past."""
        self._asked += 1
        heapq.heappush(self._queue, (max(time_ms, self.now_ms), self._asked, what, arguments))

    def run(self, until_ms: float | None = None) -> bool:
        """Until nothing is left: True; or to the last event at or before `until_ms`: False, and it is that time now."""
        queue, pop = self._queue, heapq.heappop
        while queue:
            if until_ms is not None and queue[0][0] > until_ms:
                self.now_ms = until_ms
                return False
            self.now_ms, _, what, arguments = pop(queue)
            what(*arguments)
        return True
