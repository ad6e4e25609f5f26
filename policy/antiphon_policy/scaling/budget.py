"""A budget of devices, shared between pools that want more than it has.

From the fewest that each must have, one step after another goes to the pool where it helps most: where, by the replay,
it takes the largest share of requests from late to in time, for each device. Where a step helps nowhere (all are late
anyway), to the pool that has the smallest part of what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon_policy.scaling.replay import Replay

_STEPS = 24
"""A large budget is shared in steps of several replicas: about so many in all."""


@dataclass(frozen=True, slots=True)
class Claim:
    least: int
    """It has these whatever the budget says: its floor."""
    wants: int
    devices: int
    """Of a replica."""
    load: Replay


def shared(claims: Sequence[Claim], budget_devices: int | None) -> list[int]:
    """Sizes, in the order of the claims: what they want where there is enough for all."""
    wants = [max(claim.wants, claim.least) for claim in claims]
    if budget_devices is None or _devices(claims, wants) <= budget_devices:
        return wants
    sizes = [min(claim.least, want) for claim, want in zip(claims, wants, strict=True)]
    missing = sum(want - size for want, size in zip(wants, sizes, strict=True))
    stride = max(1, missing // _STEPS)
    while True:
        free = budget_devices - _devices(claims, sizes)
        steps = [
            min(stride, want - size, free // claim.devices)
            for claim, want, size in zip(claims, wants, sizes, strict=True)
        ]
        open_to = [at for at, step in enumerate(steps) if step > 0]
        if not open_to:
            return sizes
        best = max(open_to, key=lambda at: _benefit(claims[at], sizes[at], steps[at], wants[at]))
        sizes[best] += steps[best]


def _devices(claims: Sequence[Claim], sizes: Sequence[int]) -> int:
    return sum(claim.devices * size for claim, size in zip(claims, sizes, strict=True))


def _benefit(claim: Claim, size: int, step: int, wants: int) -> tuple[float, float]:
    gain = _late(claim.load, size) - _late(claim.load, size + step)
    return gain / (step * claim.devices), 1.0 - size / wants


def _late(load: Replay, workers: int) -> float:
    return sum(load.late_share(workers))
