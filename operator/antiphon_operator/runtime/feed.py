"""From kopf's handlers into the caches, and from there to the queue.

Planning on half-filled caches would see replicas missing that are only not listed yet. So nothing is woken before the
first listing of *all* kinds has been taken in. That listing is our own, before kopf begins: `begin` opens the gate and
wakes every Model. kopf would have a gate of its own for operators with indices, but there every object waits by itself
and is woken by every other: 3,300 objects took 40 s.

After a watch that broke off for too long (410), kopf lists the kind anew and says nothing of what was deleted between.
Its events then have no type, as when it listed first: from that we know, and have `ghosts` compare.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from antiphon_operator.plan.observed import Object
from antiphon_operator.runtime.caches import Caches
from antiphon_operator.runtime.objects import uid_of

log = logging.getLogger("antiphon.operator.feed")


class Feed:
    """See the module's docstring."""

    def __init__(
        self,
        caches: Caches,
        wake: Callable[[str], None],
        relisted: Callable[[], None],
        all_known: Callable[[], None] = lambda: None,
    ) -> None:
        """`relisted`: kopf has listed a kind anew. `all_known`: the caches hold the first listing of every kind."""
        self._caches = caches
        self._wake = wake
        self._relisted = relisted
        self._all_known = all_known
        self._unheard: set[str] = set()
        self._open = False

    @property
    def complete(self) -> bool:
        """All kinds have been listed."""
        return self._open

    def begin(self) -> None:
        """The caches hold all kinds."""
        self._open = True
        self._unheard = set(self._caches.all_uids())
        log.info("all kinds are listed: %d objects, %d Models", self._caches.size(), len(self._caches.model_keys()))
        self._all_known()
        self.wake_all(self._caches.model_keys())

    def happened(self, kind: str, event: str | None, thing: Object) -> None:
        """From an event handler. `event`: None for what a listing of kopf's found."""
        if event == "DELETED":
            self.wake_all(self._caches.remove(kind, thing))
        else:
            self.wake_all(self._caches.put(kind, thing))
            if event is None and uid_of(thing) not in self._unheard:
                self._relisted()
        self._unheard.discard(uid_of(thing))

    def wake_all(self, keys: Iterable[str]) -> None:
        if self._open:
            for key in keys:
                self._wake(key)
