"""Whom a request may be given to: workers that stand, are not draining, and belong to the request's group.

Draining is said by the worker itself (it was told to end) or by the operator's record (it will be). A draining worker
gets no new request in any role, and no prefix is pulled from it either: what is pinned on it would keep it from ending.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from antiphon_gateway.fleet import Fleet, can_decode
from antiphon_gateway.groups import Candidate, Group, choose
from antiphon_gateway.worker_client import WorkerClient


class Selection:
    """Asked by the dispatcher and by pages; keeps nothing."""

    def __init__(self, fleet: Fleet, draw: Callable[[], float]) -> None:
        self._fleet = fleet
        self._draw = draw

    def usable(self, group: Group) -> list[WorkerClient]:
        draining = self._fleet.catalogue.draining(group.model)
        return [
            client
            for client in self._fleet.workers_of(group)
            if client.attachment is not None
            and client.attachment.worker_id not in draining
            and not client.queue.draining
        ]

    def decoders(self, group: Group, excluded: Collection[str] = ()) -> list[WorkerClient]:
        """The usable ones that may decode."""
        return [
            client
            for client in self.usable(group)
            if client.attachment is not None
            and can_decode(client.attachment.role)
            and client.attachment.worker_id not in excluded
        ]

    def choose(self, model: str, excluded: Collection[str] = ()) -> Group | None:
        """The group for a new request for the model, by the weights that hold now; None: nobody can decode it."""
        candidates = [
            Candidate(group, count)
            for group in self._fleet.groups_of(model)
            if (count := len(self.decoders(group, excluded)))
        ]
        record = self._fleet.catalogue.record(model)
        newest = self._fleet.models.get(model)
        return choose(
            candidates,
            record.revisions if record is not None else None,
            newest.digest if newest is not None else "",
            self._draw(),
        )
