"""The KV blocks of one held request while they come in from peers.

A held request is not computed; its blocks are reserved a stretch at a time, read from a peer, and published in order
once certain. `HeldBlocks` keeps the books: how far blocks are reserved, which of them are in, how far that is without
a gap. It belongs to one task at a time and survives the peer: what came from one that died need not come again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from antiphon_engine.interface import Engine
from antiphon_kvtransfer.identity import BlockHash
from antiphon_kvtransfer.links import LinkError, PeerLink
from antiphon_telemetry.tracing import tracer

from antiphon_worker.metrics import WorkerMetrics

PULL_DEADLINE_S = 10.0
"""For one pull. A dead peer is noticed much earlier, by the link's heartbeats."""

_tracer = tracer("antiphon.kv")


class HeldBlocks:
    """Books of the leading blocks of a held request. Raises KeyError where the engine says that the request is gone."""

    def __init__(self, engine: Engine, request_id: str, prompt_tokens: int, hashes: Sequence[BlockHash]) -> None:
        self._engine = engine
        self._request_id = request_id
        self._block_tokens = engine.info.block_tokens
        self._prompt_tokens = prompt_tokens
        self.hashes = hashes
        """Of the prompt's full blocks."""
        self._blocks: tuple[int, ...] = ()
        self._own_blocks = 0
        self._in: set[int] = set()
        self._leading = 0

    @property
    def total_blocks(self) -> int:
        """Blocks that the prompt needs, a last partial one included."""
        return -(-self._prompt_tokens // self._block_tokens)

    @property
    def full_blocks(self) -> int:
        return self._prompt_tokens // self._block_tokens

    @property
    def reserved(self) -> int:
        return len(self._blocks)

    @property
    def own_blocks(self) -> int:
        """Leading blocks that this worker had itself."""
        return self._own_blocks

    @property
    def leading(self) -> int:
        """Leading full blocks whose content is in and certain."""
        return self._leading

    @property
    def pulled(self) -> int:
        """Full blocks that came from peers."""
        return len(self._in)

    def block(self, index: int) -> int:
        """The physical number of a reserved block."""
        return self._blocks[index]

    def reserve(self, blocks: int) -> bool:
        """Reserve the leading `blocks` blocks; False when there is no room now."""
        tokens = min(blocks * self._block_tokens, self._prompt_tokens)
        reservation = self._engine.reserve(self._request_id, tokens)
        if reservation is None:
            return False
        if self._own_blocks == len(self._blocks):
            # All of ours so far: it may go on among the new ones.
            self._own_blocks = self._leading = min(reservation.filled_blocks, self.full_blocks)
        self._blocks = reservation.blocks
        return True

    def reserve_beyond_own(self, blocks: int) -> bool:
        """Reserve what this worker has itself and `blocks` more; False when there is no room now."""
        while (target := min(self._own_blocks + blocks, self.total_blocks)) > self.reserved:
            if not self.reserve(target):
                return False
        return True

    def confirm(self, begin: int, count: int) -> None:
        """Blocks [begin, begin + count) are in and certain: publish what now is without a gap."""
        self._in.update(range(begin, begin + count))
        leading = self._leading
        while leading in self._in:
            leading += 1
        if leading > self._leading:
            self._leading = leading
            self._engine.publish(self._request_id, leading * self._block_tokens)

    def publish_all(self) -> None:
        """The partial block is in as well."""
        self._engine.publish(self._request_id, self._prompt_tokens)

    def missing(self, begin: int, end: int) -> tuple[int, int] | None:
        """The first stretch of full blocks in [begin, end) that is reserved and not in."""
        end = min(end, self.full_blocks, self.reserved)
        begin = max(begin, self._leading)
        while begin < end and begin in self._in:
            begin += 1
        stop = begin
        while stop < end and stop not in self._in:
            stop += 1
        return (begin, stop) if begin < stop else None


class BlockPuller:
    """Pulls stretches of a held request's blocks over links, counts and traces them."""

    def __init__(self, held: HeldBlocks, metrics: WorkerMetrics, block_bytes: int) -> None:
        self._held = held
        self._metrics = metrics
        self._block_bytes = block_bytes

    async def pull(self, link: PeerLink, begin: int, end: int, *, deadline_s: float = PULL_DEADLINE_S) -> int:
        """Pull full blocks [begin, end) and publish; how many leading ones came. Raises LinkError."""
        started = asyncio.get_running_loop().time()
        with _tracer.start_as_current_span("kv.pull") as span:
            span.set_attribute("antiphon.blocks", end - begin)
            try:
                count = await link.pull(
                    self._held.hashes[begin:end],
                    [self._held.block(index) for index in range(begin, end)],
                    deadline_s=deadline_s,
                )
            except LinkError:
                self._metrics.pulls.labels("failed").inc()
                raise
            span.set_attribute("antiphon.pulled_blocks", count)
        self._metrics.pulls.labels("complete" if count == end - begin else "short").inc()
        self._metrics.pulled_blocks.inc(count)
        self._metrics.pulled_bytes.inc(count * self._block_bytes)
        self._metrics.pull_ms.observe((asyncio.get_running_loop().time() - started) * 1000.0)
        if count:
            self._held.confirm(begin, count)
        return count

    async def pull_partial(self, link: PeerLink, run_id: str, *, deadline_s: float = PULL_DEADLINE_S) -> bool:
        """Pull the last, partial block, which the holder knows by its prefill run. Raises LinkError."""
        with _tracer.start_as_current_span("kv.pull_partial"):
            done = await link.pull_partial(run_id, self._held.block(self._held.total_blocks - 1), deadline_s=deadline_s)
        self._metrics.pulls.labels("complete" if done else "short").inc()
        if done:
            self._metrics.pulled_blocks.inc()
            self._metrics.pulled_bytes.inc(self._block_bytes)
        return done
