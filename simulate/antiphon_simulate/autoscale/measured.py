"""Times as whoever runs a cluster measures them: the mean of the last ones, and an expectation before there are any."""

from __future__ import annotations

from collections import deque

LAST = 10


class Measured:
    def __init__(self, expected_ms: float) -> None:
        self._expected_ms = expected_ms
        self._last: deque[float] = deque(maxlen=LAST)

    def note(self, time_ms: float) -> None:
        self._last.append(time_ms)

    @property
    def mean_ms(self) -> float:
        return sum(self._last) / len(self._last) if self._last else self._expected_ms
