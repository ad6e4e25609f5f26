"""How fast workers say that they read from each other."""

from __future__ import annotations

import time
from collections.abc import Mapping

from antiphon_gateway.fleet import Fleet

_KNOWN_FOR_S = 1.0


class Links:
    """What the workers of a fleet have said of their links."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: Mapping[tuple[str, str], float] = {}
        self._gathered_at = float("-inf")

    def forget(self) -> None:
        """Somebody is new: ask all when they are needed next."""
        self._gathered_at = float("-inf")

    def gigabytes_per_s(self) -> Mapping[tuple[str, str], float]:
        """(reader, holder) -> GB/s of the links that are up, gathered once in a while."""
        now = time.monotonic()
        if now - self._gathered_at > _KNOWN_FOR_S:
            self._gathered_at = now
            links = {
                (worker_id, link.peer_worker_id): link.gigabytes_per_s
                for worker_id, client in self._fleet.workers().items()
                for link in client.queue.links
                if link.up
            }
            # One table for as long as nothing changes: what explains old decisions refers to it.
            if links != self._known:
                self._known = links
        return self._known
