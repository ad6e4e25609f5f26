"""Goodput: the highest rate at which 99 % of the feasible requests are inside the SLA.

A run says which share is inside at one rate. `GoodputSearch` decides at which rate to run next, until the crossing lies
between two rates that are close; `goodput` takes the rate from such points, on the line between the two neighbours of
the crossing. Both are pure: who runs the simulations is `cells.py`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

TARGET_SHARE = 0.99


class Crossing(enum.Enum):
    """Where the share falls below the target."""

    FOUND = "found"
    ABOVE = "above"
    """Not even at the highest rate that was tried: goodput is that rate or more."""
    BELOW = "below"
    """Already at the lowest rate that was tried: goodput is less."""
    NO_FEASIBLE_REQUEST = "no_feasible_request"
    """No request can be served inside the SLA by this hardware, at any rate."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run."""

    rate: float
    """Requests per second, or a rate scale."""
    inside_sla_share: float | None


@dataclass(frozen=True, slots=True)
class Goodput:
    rps: float | None
    """None: nothing that was tried keeps the SLA. With `ABOVE` the least that it can be."""
    crossing: Crossing


def goodput(points: Sequence[Point], target_share: float = TARGET_SHARE) -> Goodput:
    """From runs at some rates: the highest rate that keeps the target, moved towards its failing neighbour to where the
    line between their shares crosses the target."""
    known = sorted(
        ((point.rate, point.inside_sla_share) for point in points if point.inside_sla_share is not None),
        key=lambda pair: pair[0],
    )
    if not known:
        return Goodput(None, Crossing.NO_FEASIBLE_REQUEST)
    kept = [at for at, (_, share) in enumerate(known) if share >= target_share]
    if not kept:
        return Goodput(None, Crossing.BELOW)
    rate, share = known[kept[-1]]
    if kept[-1] + 1 == len(known):
        return Goodput(rate, Crossing.ABOVE)
    next_rate, next_share = known[kept[-1] + 1]
    return Goodput(rate + (next_rate - rate) * (share - target_share) / (share - next_share), Crossing.FOUND)


class GoodputSearch:
    """Bisection on the rate scale: doubled or halved until the crossing is between two rates, then the geometric middle
    until the two are within `tolerance` of each other. Ask `next_scale`, run, `learn`, until it is None."""

    def __init__(
        self,
        start: float = 1.0,
        *,
        target_share: float = TARGET_SHARE,
        tolerance: float = 0.04,
        widest: float = 64.0,
    ) -> None:
        self._start = start
        self._target = target_share
        self._tolerance = tolerance
        self._least, self._most = start / widest, start * widest
        self._kept: list[float] = []
        self._missed: list[float] = []
        self._hopeless = False

    def learn(self, scale: float, inside_sla_share: float | None) -> None:
        """What a run at that scale gave. (One that was made for another reason helps too.)"""
        if inside_sla_share is None:
            self._hopeless = True
        elif inside_sla_share >= self._target:
            self._kept.append(scale)
        else:
            self._missed.append(scale)

    def next_scale(self) -> float | None:
        """Where to run next; None: found, or there is nothing to find."""
        if self._hopeless:
            return None
        if not self._kept:
            lower = min(self._missed, default=2.0 * self._start) / 2.0
            return lower if lower >= self._least else None
        low = max(self._kept)
        above = [scale for scale in self._missed if scale > low]
        if not above:
            return 2.0 * low if 2.0 * low <= self._most else None
        high = min(above)
        return math.sqrt(low * high) if high > low * (1.0 + self._tolerance) else None
