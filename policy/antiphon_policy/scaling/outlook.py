"""What is foreseen as several loads, each with how often it comes, and how many of the requests would be late over all.

A forecast is wrong by chance, and its past errors say by how much. To keep the percentile at the upper end of them
would promise more than is promised: that end is reached once in so many times. So the late are counted at each of
several loads, and weighed by how many requests come there:

    late(n) = sum of share * late(n, load)          share: how often that load comes, times its rate; they add up to 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from antiphon_policy.scaling.replay import INFINITE, Replay, fewest


class Outlook:
    def __init__(self, parts: Sequence[tuple[float, Callable[[], Replay]]]) -> None:
        """(weight, what makes the replay of a load), the heaviest load first. One is replayed only if it has to be."""
        whole = sum(weight for weight, _ in parts)
        self._parts = [_Part(weight / whole, make) for weight, make in parts if weight > 0.0]

    @property
    def heaviest(self) -> Replay:
        return self._parts[0].replay

    @property
    def middle(self) -> Replay:
        return self._parts[-1].replay

    def keeps(self, workers: int, part: float = 1.0) -> bool:
        """Whether no more are late than `part` of those that may be."""
        if workers < self.middle.offered_workers:
            return False
        late = 0.0
        for one in self._parts:
            found = one.replay.of_may_be(workers, (part - late) / one.share)
            if found == INFINITE:
                return False
            if found == 0.0:
                # A lighter load is not served later.
                return True
            late += one.share * found
        return late <= part + 1e-9

    def fewest(self, guess: int, most: int, part: float = 1.0) -> int:
        """The fewest workers, up to `most`, that keep it; `most` + 1: not even those."""
        return fewest(lambda workers: self.keeps(workers, part), guess, most)


class _Part:
    def __init__(self, share: float, make: Callable[[], Replay]) -> None:
        self.share = share
        self._make = make

    @cached_property
    def replay(self) -> Replay:
        return self._make()
