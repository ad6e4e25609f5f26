"""What the gateway knows of each worker: its last report, and what was routed to it since.

A worker numbers what it receives and says in each report how much of it is counted there. What was routed later is a
pledge: it counts at once, and is dropped by the first report that has it. So nothing is missing or counted twice,
however late reports are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from antiphon_simulate.records import WorkerState


@dataclass(frozen=True, slots=True)
class Figures:
    """A worker's load, or what one request adds to it."""

    queued_tokens: int = 0
    queued_requests: int = 0
    running: int = 0
    kv_tokens: int = 0
    taken_blocks: int = 0
    """Neither free nor evictable."""

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.queued_tokens + other.queued_tokens,
            self.queued_requests + other.queued_requests,
            self.running + other.running,
            self.kv_tokens + other.kv_tokens,
            self.taken_blocks + other.taken_blocks,
        )

    def __sub__(self, other: Figures) -> Figures:
        return Figures(
            self.queued_tokens - other.queued_tokens,
            self.queued_requests - other.queued_requests,
            self.running - other.running,
            self.kv_tokens - other.kv_tokens,
            self.taken_blocks - other.taken_blocks,
        )


class WorkerBook:
    """Keeps one `WorkerState` true."""

    def __init__(self, state: WorkerState) -> None:
        self.state = state
        self._reported = Figures()
        self._received = 0
        """How many of those routed to it the last report counted."""
        self._pledges: deque[Figures] = deque()
        """Routed since, oldest first."""
        self._pledged = Figures()
        self._write()

    def pledge(self, figures: Figures) -> None:
        """Something was routed to the worker."""
        self._pledges.append(figures)
        self._pledged += figures
        self._write()

    def report(self, figures: Figures, received: int) -> None:
        """Reports come in the order in which they were sent."""
        for _ in range(received - self._received):
            self._pledged -= self._pledges.popleft()
        self._received = received
        self._reported = figures
        self._write()

    def _write(self) -> None:
        known = self._reported + self._pledged
        state = self.state
        state.queued_tokens = known.queued_tokens
        state.queued_requests = known.queued_requests
        state.running = known.running
        state.kv_tokens = known.kv_tokens
        state.free_blocks = max(0, state.total_blocks - known.taken_blocks)
