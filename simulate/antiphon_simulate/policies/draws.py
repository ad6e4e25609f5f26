"""More random numbers from the one that a policy gets: `Arrival.draw` is all the randomness there is, so a run with the
same seed makes the same choices, and two policies that meet the same arrival draw the same.
"""

from __future__ import annotations

from collections.abc import Iterator

_MASK = (1 << 64) - 1


def draws(first: float) -> Iterator[float]:
    """Endless numbers in [0, 1), a function of `first` alone: SplitMix64 (Steele, Lea, Flood 2014), started at it."""
    state = int(first * (1 << 53))
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        yield ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)
