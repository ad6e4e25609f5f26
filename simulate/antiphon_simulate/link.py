"""What brings blocks to a worker: one transfer after the other, each as long as the latency model says."""

from __future__ import annotations

from antiphon_policy.latency import transfer_ms

from antiphon_simulate.events import Events
from antiphon_simulate.records import Timing


class Link:
    def __init__(self, events: Events, timing: Timing) -> None:
        self._events = events
        self._timing = timing
        self._free_ms = 0.0

    def receive(self, blocks: int) -> float:
        """When so many blocks that set out now will be here."""
        timing = self._timing
        self._free_ms = max(self._free_ms, self._events.now_ms) + transfer_ms(
            blocks * timing.block_bytes, gigabytes_per_s=timing.link_gigabytes_per_s
        )
        return self._free_ms
