"""Which peers this worker is wired up to: all that any gateway has named."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon_kvtransfer.links import PeerAddress, PeerLinks


class WantedPeers:
    """Joins the lists of several gateways, which may lag behind each other."""

    def __init__(self, links: PeerLinks, worker_id: str) -> None:
        self._links = links
        self._worker_id = worker_id
        self._lists: dict[object, tuple[PeerAddress, ...]] = {}
        self._departed: set[object] = set()

    def replace(self, gateway: object, peers: Sequence[PeerAddress]) -> None:
        """`gateway`'s list is now this one."""
        for departed in self._departed:
            del self._lists[departed]
        self._departed.clear()
        self._lists[gateway] = tuple(peer for peer in peers if peer.worker_id != self._worker_id)
        self._links.wanted(list(dict.fromkeys(peer for named in self._lists.values() for peer in named)))

    def depart(self, gateway: object) -> None:
        """`gateway` is gone. Its list counts until a gateway sends one: links outlive a gateway's restart."""
        if gateway in self._lists:
            self._departed.add(gateway)
