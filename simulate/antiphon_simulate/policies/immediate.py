"""The base of policies that keep nothing back: each request is placed the moment it arrives.

A subclass says where (`place`), by what `self.cluster` shows then. Requests that arrived together are placed one after
the other, each counted into the workers' states before the next is looked at.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator

from antiphon_simulate.records import Arrival, ClusterView, Placement, TraceRequest


class ImmediatePolicy(ABC):
    """See the module's docstring. One object lives through one run."""

    name: str

    cluster: ClusterView
    """From `begin` on."""

    def __init__(self) -> None:
        self._arrived: deque[Arrival] = deque()

    def begin(self, cluster: ClusterView) -> None:
        """A subclass that prepares something overrides this and calls it first."""
        self.cluster = cluster

    @abstractmethod
    def place(self, arrival: Arrival, now_ms: float) -> Placement:
        """Where this request goes."""

    def arrived(self, arrival: Arrival) -> None:
        self._arrived.append(arrival)

    def dispatch(self, now_ms: float) -> Iterator[tuple[TraceRequest, Placement]]:
        while self._arrived:
            arrival = self._arrived.popleft()
            yield arrival.request, self.place(arrival, now_ms)

    def ended(self, request: TraceRequest, placement: Placement, now_ms: float) -> None:  # noqa: B027
        """Nothing to do, but for those that count what they have placed."""
