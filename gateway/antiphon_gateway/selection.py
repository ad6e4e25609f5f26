"""Whom a request may be given to: workers that stand, are not draining, and belong to the request's group.

Draining is said by the worker itself (it was told to end) or by the operator's record (it will be). A draining worker
gets no new request in any role, and no prefix is pulled from it either: what is pinned on it would keep it from ending.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from antiphon_policy.routing import WorkerRole

from antiphon_gateway.fleet import Fleet, can_decode
from antiphon_gateway.groups import Candidate, Group, choose
from antiphon_gateway.worker_client import WorkerClient


class Selection:
    """Asked by the dispatcher and by pages; keeps nothing."""

    def __init__(self, fleet: Fleet, draw: Callable[[], float]) -> None:
        self._fleet = fleet
        self._draw = draw

    def usable(self, group: Group) -> Iterator[WorkerClient]:
        draining = self._fleet.catalogue.draining(group.model)
        for client in self._fleet.workers_of(group):
            attachment = client.attachment
            if attachment is not None and attachment.worker_id not in draining and not client.queue.draining:
                yield client

    def decoders(self, group: Group, excluded: Collection[str] = ()) -> Iterator[WorkerClient]:
        """The usable ones that may decode."""
        for client in self.usable(group):
            attachment = client.attachment
            if attachment is not None and can_decode(attachment.role) and attachment.worker_id not in excluded:
                yield client

    def choose(self, model: str, excluded: Collection[str] = ()) -> Group | None:
        """The group for a new request for the model, by the weights that hold now; None: nobody can decode it."""
        groups = self._fleet.groups_of(model)
        if len(groups) == 1:
            # As nearly always: its workers need not be counted.
            return groups[0] if self._serves(groups[0], excluded) else None
        candidates = [
            Candidate(group, count) for group in groups if (count := sum(1 for _ in self.decoders(group, excluded)))
        ]
        record = self._fleet.catalogue.record(model)
        newest = self._fleet.models.get(model)
        return choose(
            candidates,
            record.revisions if record is not None else None,
            newest.digest if newest is not None else "",
            self._draw(),
        )

    def _serves(self, group: Group, excluded: Collection[str]) -> bool:
        """Whether there is one of its `decoders`. Asked for each request, so without them."""
        draining = self._fleet.catalogue.draining(group.model)
        for client in self._fleet.workers_of(group):
            attachment = client.attachment
            if (
                attachment is not None
                and attachment.role is not WorkerRole.PREFILL
                and attachment.worker_id not in draining
                and attachment.worker_id not in excluded
                and not client.queue.draining
            ):
                return True
        return False
