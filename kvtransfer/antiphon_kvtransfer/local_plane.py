"""The data plane of one rank in this process: its pool, its transports, its connections to ranks of peers.

A rank reads from every rank of a peer that holds something of its part (`ranges.sources_of`). To each of them it
connects the best transport that both sides have and that works, and measures it, so that the first read pays nothing
and a fall to a slower transport is said aloud. What may fail: a transport cannot run here (it is left out), all of them
cannot (TransportUnavailable), no transport works to a rank (TransportError).

The one idea: *a rank that has one source reads from it as if there were no ranks*; only several sources make a read of
reads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon_kvtransfer._reads import FailedRead, joined
from antiphon_kvtransfer._together import together
from antiphon_kvtransfer.plane import KvPart, PeerPool, PeerRank, RankPlane, Wire, wire_of_shares
from antiphon_kvtransfer.ranges import Source, ranges_between, sources_of
from antiphon_kvtransfer.transport import (
    PeerKey,
    ReadHandle,
    ReadRange,
    Region,
    Transport,
    TransportError,
    TransportUnavailable,
)

_log = logging.getLogger("antiphon.kvtransfer.plane")

_MEASURED_READS = 4
_PeerId = tuple[str, str]
"""(worker, incarnation)"""


@dataclass(frozen=True, slots=True)
class _Connection:
    """A source, wired up."""

    source: Source
    key: PeerKey
    transport: Transport
    wire: Wire


class LocalRankPlane(RankPlane):
    """`transports`: best first; all of them register `region`, which holds `num_blocks` blocks of this rank's part."""

    def __init__(
        self,
        rank: int,
        part: KvPart,
        region: Region,
        block_bytes: int,
        num_blocks: int,
        transports: Sequence[Transport],
    ) -> None:
        if block_bytes % (part.layers * part.heads):
            raise ValueError(f"{block_bytes} bytes are no whole number for each of {part.layers} x {part.heads}")
        if region.length_bytes < block_bytes * num_blocks:
            raise ValueError(f"{num_blocks} blocks of {block_bytes} bytes are not in {region.length_bytes} bytes")
        self.rank = rank
        self.part = part
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self._scratch_offset_bytes = region.length_bytes
        self._layer_bytes = block_bytes // (part.layers * part.heads)
        self._offered = tuple(transports)
        self._started: list[Transport] = []
        self._unavailable: list[str] = []
        """Why, of each that does not run here."""
        self._connections: dict[_PeerId, list[_Connection]] = {}

    async def start(self) -> None:
        for transport in self._offered:
            try:
                await transport.start()
            except TransportUnavailable as error:
                _log.warning("transport %s is not used: %s", transport.name, error)
                self._unavailable.append(f"{transport.name}: {error}")
            else:
                self._started.append(transport)
        if not self._started:
            raise TransportUnavailable(f"no KV transport can run here ({'; '.join(self._unavailable)}); offer tcp")

    @property
    def endpoints(self) -> tuple[tuple[str, bytes], ...]:
        return tuple((one.name, one.metadata()) for one in self._started)

    async def connect(self, peer: PeerPool, deadline_s: float) -> Wire:
        await self.disconnect(peer)
        sources = sources_of(self.part, self.rank, peer.ranks)
        if not sources:
            raise TransportError(f"no rank of worker {peer.worker_id} holds anything of rank {self.rank}'s part")
        # Known from the start: whatever happens, `disconnect` finds what was connected.
        connections = self._connections[_peer_id(peer)] = []
        try:
            async with asyncio.timeout(deadline_s):
                await together(self._connect(peer, source, deadline_s, connections) for source in sources)
        except TimeoutError as error:
            await self.disconnect(peer)
            raise TransportError(f"not wired up to worker {peer.worker_id} within {deadline_s:g} s") from error
        except BaseException:
            await self.disconnect(peer)
            raise
        connections.sort(key=lambda one: one.source.peer.rank)
        return wire_of_shares([(f"from rank {one.source.peer.rank}", one.source.part, one.wire) for one in connections])

    def read(self, peer: PeerPool, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> ReadHandle:
        connections = self._connections.get(_peer_id(peer))
        if not connections:
            raise TransportError(f"not connected to worker {peer.worker_id}: connect first")
        for block in local_blocks:
            if not 0 <= block < self.num_blocks:
                raise TransportError(f"local block {block} is none of rank {self.rank}'s {self.num_blocks} blocks")
        reads: list[ReadHandle] = []
        for one in connections:
            ranges = ranges_between(self.part, one.source.peer.part, remote_blocks, local_blocks, self._layer_bytes)
            try:
                reads.append(one.transport.read(one.key, ranges))
            except TransportError as error:
                if not reads:
                    raise
                reads.append(FailedRead(error))  # What was started has to end first.
                break
        return joined(reads)

    async def disconnect(self, peer: PeerPool) -> None:
        connections = self._connections.pop(_peer_id(peer), [])
        await together(one.transport.disconnect(one.key) for one in connections)

    async def close(self) -> None:
        self._connections.clear()
        started, self._started = self._started, []
        for transport in started:
            await transport.close()

    async def _connect(self, peer: PeerPool, source: Source, deadline_s: float, connections: list[_Connection]) -> None:
        """Connect the best transport that both sides have and that works. Raises TransportError."""
        key = PeerKey(f"{peer.worker_id}/{peer.incarnation}/{source.peer.rank}")
        offered = dict(source.peer.endpoints)
        skipped = list(self._unavailable)
        for transport in self._started:
            metadata = offered.get(transport.name)
            if metadata is None:
                skipped.append(f"{transport.name}: the peer does not serve it")
                continue
            try:
                await transport.connect(key, metadata, deadline_s / 2)
                gigabytes_per_s = await self._measure(transport, key, source.peer, deadline_s / 2)
            except TransportError as error:
                _log.warning("%s does not work to %s: %s", transport.name, key, error)
                skipped.append(f"{transport.name}: {error}")
                await transport.disconnect(key)
                continue
            except BaseException:
                await transport.disconnect(key)
                raise
            wanted = self._offered[0].name
            detail = ""
            if transport.name != wanted:
                detail = f"{transport.name} is used instead of {wanted} ({'; '.join(skipped)})"
            connections.append(_Connection(source, key, transport, Wire(transport.name, gigabytes_per_s, detail)))
            return
        raise TransportError(f"no common transport with {key} works ({'; '.join(skipped)})")

    async def _measure(self, transport: Transport, key: PeerKey, peer: PeerRank, deadline_s: float) -> float:
        """GB/s of the best of a few reads from the start of the peer's pool into scratch memory."""
        length = min(transport.scratch_bytes, peer.num_blocks * peer.block_bytes)
        best = 0.0
        for _ in range(_MEASURED_READS):
            began = time.perf_counter()
            handle = transport.read(key, [ReadRange(0, self._scratch_offset_bytes, length)])
            await handle.wait(deadline_s)
            best = max(best, length / (time.perf_counter() - began) / 1e9)
        return best


def _peer_id(peer: PeerPool) -> _PeerId:
    return peer.worker_id, peer.incarnation
