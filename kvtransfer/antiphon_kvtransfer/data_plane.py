"""All ranks of this worker as one: a read is complete when it is complete on all of them, and ended when on all.

Owned by the worker's `PeerLinks`. A rank that fails fails the read, and the other ranks give their parts up; the target
blocks, which have the same numbers on all ranks, are free only after the last rank's read has ended. With one rank
everything is that rank's own: no task and no object stands between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from antiphon_kvtransfer._reads import FailedRead, joined
from antiphon_kvtransfer._together import together
from antiphon_kvtransfer.plane import PeerPool, RankPlane, Wire, wire_of_shares
from antiphon_kvtransfer.transport import ReadHandle, TransportError

_log = logging.getLogger("antiphon.kvtransfer.plane")


class DataPlane:
    """`ranks`: all of this worker's, of one block pool: the same number of blocks in each."""

    def __init__(self, ranks: Sequence[RankPlane]) -> None:
        self.ranks = tuple(ranks)
        if len({rank.num_blocks for rank in self.ranks}) != 1:
            counts = ", ".join(f"rank {rank.rank}: {rank.num_blocks}" for rank in self.ranks)
            raise ValueError(f"all ranks of a worker have the same number of blocks, not {counts or 'none'}")

    @property
    def num_blocks(self) -> int:
        return self.ranks[0].num_blocks

    @property
    def problem(self) -> str:
        """Why nothing can be read any more. Empty: nothing is known to be wrong."""
        return "; ".join(rank.problem for rank in self.ranks if rank.problem)

    async def start(self) -> None:
        """Raises TransportUnavailable if no transport can run on some rank, or TransportError."""
        await together(rank.start() for rank in self.ranks)

    async def connect(self, peer: PeerPool, deadline_s: float) -> Wire:
        """Raises TransportError if one rank cannot; then none is connected."""
        try:
            wires = await together(rank.connect(peer, deadline_s) for rank in self.ranks)
        except BaseException:
            await self.disconnect(peer)
            raise
        return wire_of_shares(
            [(f"rank {rank.rank}", rank.part, wire) for rank, wire in zip(self.ranks, wires, strict=True)]
        )

    def read(self, peer: PeerPool, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> ReadHandle:
        """Raises TransportError, and then nothing was started."""
        reads: list[ReadHandle] = []
        for rank in self.ranks:
            try:
                reads.append(rank.read(peer, remote_blocks, local_blocks))
            except TransportError as error:
                if not reads:
                    raise
                reads.append(FailedRead(error))  # What was started has to end first.
                break
        return joined(reads)

    async def disconnect(self, peer: PeerPool) -> None:
        await _each("disconnect", (rank.disconnect(peer) for rank in self.ranks))

    async def close(self) -> None:
        await _each("close", (rank.close() for rank in self.ranks))


async def _each(what: str, calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of them, whatever becomes of the others."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, Exception):
            _log.warning("a rank's data plane did not %s: %s", what, outcome)
