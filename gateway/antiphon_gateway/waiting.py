"""The waiting queue of one model: first come first served within a tenant, tenants in turn.

A choice that a worker had no room for comes back to the place that it had. Plain data, no I/O; bounds and deadlines
are the dispatcher's.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from antiphon_gateway.flight import Choice


class WaitingQueue:
    def __init__(self) -> None:
        self._tenants: OrderedDict[str, deque[Choice]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, choice: Choice) -> None:
        """Behind everything of its tenant."""
        self._tenants.setdefault(choice.flight.ticket.tenant, deque()).append(choice)
        self._size += 1

    def put_back(self, choice: Choice) -> None:
        """At the place that its order gives it, and its tenant is next."""
        tenant = choice.flight.ticket.tenant
        queue = self._tenants.setdefault(tenant, deque())
        place = 0
        while place < len(queue) and queue[place].order < choice.order:
            place += 1
        queue.insert(place, choice)
        self._tenants.move_to_end(tenant, last=False)
        self._size += 1

    def head(self) -> Choice:
        """The next one. Only while there is one."""
        return next(iter(self._tenants.values()))[0]

    def pop(self) -> Choice:
        """Take the next one; its tenant goes behind the others."""
        tenant, queue = next(iter(self._tenants.items()))
        choice = queue.popleft()
        self._size -= 1
        if queue:
            self._tenants.move_to_end(tenant)
        else:
            del self._tenants[tenant]
        return choice

    def remove(self, choice: Choice) -> bool:
        """Whether it was waiting."""
        tenant = choice.flight.ticket.tenant
        queue = self._tenants.get(tenant)
        if queue is None or choice not in queue:
            return False
        queue.remove(choice)
        self._size -= 1
        if not queue:
            del self._tenants[tenant]
        return True
