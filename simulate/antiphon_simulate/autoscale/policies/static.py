"""Sizes that do not change, or that a schedule says."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon_simulate.autoscale.records import Seen, Sizes, Wish

LOOK_MS = 2_000.0
_ROUNDING_MS = 1e-3


class Static:
    """The same sizes at all times."""

    def __init__(self, name: str, sizes: Sizes) -> None:
        self.name = name
        self.interval_ms = 60_000.0
        self._wish = Wish(sizes)

    def decide(self, seen: Seen) -> Wish:
        return self._wish


class Scheduled:
    """Orders what a schedule wants to have ready, so early that every start has ended by then.

    `schedule[k]` is wanted from `k * slot_ms` on. Whoever knows the future orders before; nothing is let go that will
    be wanted again before a new one could have started.
    """

    def __init__(self, name: str, schedule: Sequence[Sizes], *, slot_ms: float, lead_ms: float) -> None:
        self.name = name
        self.interval_ms = min(LOOK_MS, slot_ms)
        self._schedule = schedule
        self._slot_ms = slot_ms
        self._lead_ms = lead_ms

    def decide(self, seen: Seen) -> Wish:
        last = len(self._schedule) - 1
        now_ms = seen.now_ms + _ROUNDING_MS
        # The next look is too late for what begins before it could be ready.
        until_ms = seen.now_ms + self._lead_ms + self.interval_ms - _ROUNDING_MS
        first, end = int(now_ms // self._slot_ms), int(until_ms // self._slot_ms)
        ahead = self._schedule[min(first, last) : max(first, end) + 1]
        return Wish(Sizes(max(sizes.prefill for sizes in ahead), max(sizes.decode for sizes in ahead)))
