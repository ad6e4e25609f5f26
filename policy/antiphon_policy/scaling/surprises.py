"""Loads that nobody had foreseen, and what became of them: how far to believe the next one.

A *surprise* is a block in which far more came than had been foreseen for it. One that is still there a start later was
a step, and whoever followed it was right; one that has gone by then was a *burst*, and workers that were asked for then
came too late. So the next jump is believed as far as those before it lasted, by least squares, as if one as large as
itself had lasted: the first is believed whole, one after two equal bursts to a third.

A burst that at least doubled the load can come again, unannounced, and only standing room would help then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SURE = 3.0
"""Standard deviations above what was foreseen."""

LOOKED_BLOCKS = 60
"""Those of the last so many blocks count."""

_DOUBLED = 1.0


@dataclass(frozen=True, slots=True)
class Surprise:
    """Counts of one block."""

    expected: float
    more: float
    """That came above what had been expected."""
    lasted: float
    """What of that was still there a horizon later."""

    @property
    def is_burst(self) -> bool:
        return self.more >= _DOUBLED * self.expected and self.lasted < 0.5 * self.more


def surprises_of(series: Sequence[float], said: Sequence[float], steps: int) -> list[Surprise]:
    """`said`: what was foreseen after each block for `steps` blocks later."""
    found = []
    for at in range(max(steps, len(series) - steps - LOOKED_BLOCKS), len(series) - steps):
        expected = said[at - steps]
        more = series[at] - expected
        if more > SURE * math.sqrt(expected + 1.0):
            found.append(Surprise(expected, more, min(more, max(0.0, series[at + steps] - expected))))
    return found


def lasting_share(surprises: Sequence[Surprise], jump: float) -> float:
    """Which part of a jump, of so much more in a block, is to be believed."""
    prior = jump * jump
    lasted = sum(one.lasted * one.more for one in surprises)
    return (prior + lasted) / (prior + sum(one.more * one.more for one in surprises)) if prior > 0.0 else 1.0


def largest_burst(surprises: Sequence[Surprise]) -> float:
    """Its block; 0: there was none."""
    return max((one.expected + one.more for one in surprises if one.is_burst), default=0.0)
