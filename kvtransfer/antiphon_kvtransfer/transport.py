"""The data plane: read ranges of a peer's KV pool into our own, with a deadline, many reads in flight.

The reader pulls (one-sided READ); the holder's engine is not involved. A `Transport` owns the registration of
one local region (the KV pool of one rank) and the connections to peers. The one idea: *a read that was given up
is not a read that has ended*. `ReadHandle.wait` may time out or be cancelled while hardware (or the kernel)
still writes into our memory, so each handle also has `ended`, and memory that is the target of an unfinished
read must not be reused before it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

PeerKey = NewType("PeerKey", str)
"""Names one incarnation of one rank of one peer: "<worker_id>/<incarnation>/<rank>"."""


@dataclass(frozen=True, slots=True)
class ReadRange:
    """One contiguous range to read. Offsets count from the start of each side's registered region."""

    remote_offset_bytes: int
    local_offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Region:
    """The local memory that peers may read and that reads land in. Must stay allocated until `Transport.close`."""

    address: int
    length_bytes: int


class TransportError(Exception):
    """A read or a connection failed. The message says with whom and what to do; the cause is kept."""


class TransportUnavailable(TransportError):
    """This transport cannot run on this host (for instance: NIXL is not installed)."""


class ReadHandle(ABC):
    """One read in flight."""

    @abstractmethod
    async def wait(self, deadline_s: float) -> None:
        """Return when all ranges are in local memory.

        Raises TransportError when the read failed or `deadline_s` seconds passed. May be cancelled.
        After an error the read may still be running: see `ended`.
        """

    @property
    @abstractmethod
    def ended(self) -> asyncio.Future[None]:
        """Done (never an exception, never cancelled) once nothing can write into the target ranges any more.

        After an error or cancellation of `wait` the transport itself works towards this (closes the connection,
        aborts the request), without anyone waiting on it.
        """


class Transport(ABC):
    """Reads from peers into the one registered local region. Used from one event loop."""

    name: str

    @property
    @abstractmethod
    def scratch_bytes(self) -> int:
        """How much memory of its own the transport has; local offsets from `region.length_bytes` on name it.

        A read may land there instead of in the region (not across both): that is how a link is measured without
        touching a live block. Peers cannot read it.
        """

    @abstractmethod
    async def start(self) -> None:
        """Register the region and begin to serve peers. Raises TransportUnavailable."""

    @abstractmethod
    def metadata(self) -> bytes:
        """Opaque bytes with which a peer's transport of the same name can `connect` to this one.

        Whoever holds them can read the whole region.
        """

    @abstractmethod
    async def connect(self, peer: PeerKey, metadata: bytes, deadline_s: float) -> None:
        """Wire up to a peer so that the first read pays nothing. Raises TransportError.

        Connecting again under the same key replaces the connection.
        """

    @abstractmethod
    def read(self, peer: PeerKey, ranges: Sequence[ReadRange]) -> ReadHandle:
        """Start to read. Raises TransportError if the peer is not connected or a range is out of bounds."""

    @abstractmethod
    async def disconnect(self, peer: PeerKey) -> None:
        """Forget the peer. Its reads in flight fail, and end."""

    @abstractmethod
    async def close(self) -> None:
        """End all reads, close all connections, release the registration."""
