"""The trails of the last requests, for whoever asks later. Owned by the gateway; used on its event loop only.

Bounded by number and by bytes, oldest out first. Bytes are an estimate: so much for a trail, a record, a worker in a
snapshot and a link. Tables of link speeds are shared by many records, so each is counted once, as long as a record
that is kept refers to it.
"""

from __future__ import annotations

import re
from collections import OrderedDict

from antiphon_gateway.explain import LINK_BYTES, Links, Trail

_KNOWN_ID = re.compile(r"^(?:chatcmpl-|cmpl-|msg_|resp_)?([0-9a-f]{32})(?:-\d+\.\d+)?$")


class ExplainStore:
    """See the module. O(1) for each request."""

    def __init__(self, requests: int, max_bytes: int, gateway_id: str = "") -> None:
        self.most_requests = requests
        self.gateway_id = gateway_id
        self._max_bytes = max_bytes
        self._trails: OrderedDict[str, Trail] = OrderedDict()
        self._by_client: dict[tuple[str, str], Trail] = {}
        self._links: dict[int, _Links] = {}
        """Tables of link speeds, by identity: many records share one."""
        self.size_bytes = 0
        """About."""

    def __len__(self) -> int:
        return len(self._trails)

    def keep(self, trail: Trail) -> None:
        """From now on it can be found, until so many others came that it is forgotten. Idempotent."""
        if trail.request_id in self._trails or self.most_requests < 1:
            return
        trail.store = self
        self._trails[trail.request_id] = trail
        if trail.client_request_id:
            self._by_client[trail.tenant, trail.client_request_id] = trail
        self.size_bytes += trail.size_bytes
        self._forget_oldest()

    def grew(self, by_bytes: int, *, links: Links, dropped: Links | None = None) -> None:
        """A trail in the store has a record more, with that table of links (and lost another one)."""
        self.size_bytes += by_bytes
        if links:
            held = self._links.get(id(links))
            if held is None:
                held = self._links[id(links)] = _Links(links)
                self.size_bytes += LINK_BYTES * len(links)
            held.records += 1
        if dropped:
            self._release(dropped)
        self._forget_oldest()

    def find(self, request_id: str, tenant: str) -> Trail | None:
        """By the client's own `x-request-id` (the last request with it), by an answer's id, or by an id of the logs."""
        trail = self._by_client.get((tenant, request_id))
        if trail is None:
            known = _KNOWN_ID.match(request_id)
            trail = self._trails.get(known.group(1)) if known is not None else None
        return trail if trail is not None and trail.tenant == tenant else None

    def _forget_oldest(self) -> None:
        while self._trails and (len(self._trails) > self.most_requests or self.size_bytes > self._max_bytes):
            _, trail = self._trails.popitem(last=False)
            trail.store = None
            self.size_bytes -= trail.size_bytes
            if self._by_client.get((trail.tenant, trail.client_request_id)) is trail:
                del self._by_client[trail.tenant, trail.client_request_id]
            for attempts in trail.choices.values():
                for record in attempts:
                    self._release(record.inputs.links)

    def _release(self, links: Links) -> None:
        if not links:
            return
        held = self._links[id(links)]
        held.records -= 1
        if not held.records:
            del self._links[id(links)]
            self.size_bytes -= LINK_BYTES * len(links)


class _Links:
    """One table of link speeds and how many kept records refer to it."""

    __slots__ = ("records", "table")

    def __init__(self, table: Links) -> None:
        self.table = table
        self.records = 0
