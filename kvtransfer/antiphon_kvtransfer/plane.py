"""The data plane of a worker: the KV pools of its ranks, and reads of a peer's blocks into them.

A worker of one device has one rank; one that is spread over several has as many pools as ranks, each with its own part
of the model's KV (a range of layers, a range of KV heads) under the same block numbers. Peers may be cut otherwise. The
one idea: *ranks read from ranks*. Each local rank reads, of every block, exactly the layers and heads that it holds,
from whichever of the peer's ranks have them; nothing is gathered anywhere. A read is complete when it is complete on
all ranks, and has ended when it has ended on all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon_kvtransfer.transport import ReadHandle


@dataclass(frozen=True, slots=True)
class KvPart:
    """Layers [layer_begin, layer_end) of KV heads [head_begin, head_end)."""

    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int

    @property
    def layers(self) -> int:
        return self.layer_end - self.layer_begin

    @property
    def heads(self) -> int:
        return self.head_end - self.head_begin


@dataclass(frozen=True, slots=True)
class PeerRank:
    """One rank of a peer, from its checked card."""

    rank: int
    part: KvPart
    num_blocks: int
    block_bytes: int
    """Of this rank's pool: the stride between its blocks."""
    endpoints: tuple[tuple[str, bytes], ...]
    """(transport, metadata), best first."""


@dataclass(frozen=True, slots=True)
class PeerPool:
    """All ranks of one incarnation of a peer."""

    worker_id: str
    incarnation: str
    ranks: tuple[PeerRank, ...]


@dataclass(frozen=True, slots=True)
class Wire:
    """How blocks come from a peer now."""

    transport: str
    gigabytes_per_s: float
    """Measured when wired up. Of several ranks together: the rate at which whole blocks come, see `wire_of_shares`."""
    detail: str
    """Why it is not the transport that was wanted most. Empty: nothing to say."""


def wire_of_shares(shares: Sequence[tuple[str, KvPart, Wire]]) -> Wire:
    """One wire of several that each bring their part of every block, side by side: (whose, its part, its wire).

    A block is in when its last part is, so the slowest for its share decides. A part with the share s of the block
    (in bytes; copies count once) over a wire of g GB/s lets whole blocks come at g / s: the smallest of these is the
    rate of all. Two ranks with half of the block each, at 10 and 6 GB/s: 12 GB/s. The transport is that of the wire
    that is not what was wanted most, if there is one, else of the slowest.
    """
    if len(shares) == 1:
        return shares[0][2]
    whole = sum(part.layers * part.heads for part in {part for _, part, _ in shares})
    rates = [wire.gigabytes_per_s * whole / (part.layers * part.heads) for _, part, wire in shares]
    told: dict[str, list[str]] = {}
    for whose, _, wire in shares:
        if wire.detail:
            told.setdefault(wire.detail, []).append(whose)
    worst = min(zip(rates, shares, strict=True), key=lambda one: (not one[1][2].detail, one[0]))[1][2]
    return Wire(worst.transport, min(rates), "; ".join(f"{', '.join(who)}: {why}" for why, who in told.items()))


class RankPlane(ABC):
    """One local rank's pool. Used from one event loop; the pool may be in another process."""

    rank: int
    part: KvPart
    num_blocks: int
    block_bytes: int

    @property
    def problem(self) -> str:
        """Why nothing can be read into this pool any more. Empty: nothing is known to be wrong."""
        return ""

    @abstractmethod
    async def start(self) -> None:
        """Begin to serve peers. Raises TransportUnavailable if no transport can run."""

    @property
    @abstractmethod
    def endpoints(self) -> tuple[tuple[str, bytes], ...]:
        """(transport, metadata) of what was started, best first."""

    @abstractmethod
    async def connect(self, peer: PeerPool, deadline_s: float) -> Wire:
        """Connect to those ranks of the peer that hold something of this rank's part, and measure.

        Raises TransportError. Connecting again replaces the connections.
        """

    @abstractmethod
    def read(self, peer: PeerPool, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> ReadHandle:
        """Start to read this rank's part of each remote block into the local block beside it. Raises TransportError."""

    @abstractmethod
    async def disconnect(self, peer: PeerPool) -> None:
        """Forget the peer. Its reads in flight fail, and end."""

    @abstractmethod
    async def close(self) -> None:
        """End all reads, close all connections, release the registration."""
