"""Workers as the block index sees them: a set of hashes that changes, and an announcer that tells of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

from antiphon_kvtransfer.announcer import WorkerAnnouncer
from antiphon_kvtransfer.identity import BlockHash
from antiphon_kvtransfer.records import WorkerRecord


def block(name: object) -> BlockHash:
    """A hash that is told apart easily."""
    return BlockHash(str(name).encode().rjust(16, b".")[-16:])


def record(worker_id: str = "w0", incarnation: str = "i1", **fields: object) -> WorkerRecord:
    values: dict[str, object] = {
        "worker_id": worker_id,
        "incarnation": incarnation,
        "role": "both",
        "role_version": 1,
        "model": "demo",
        "card_digest": "c",
        "address": "127.0.0.1:1",
        "status_address": "127.0.0.1:2",
        "total_blocks": 100,
        "block_tokens": 64,
        "started_at_ms": 1,
    }
    return WorkerRecord(**(values | fields))  # type: ignore[arg-type]


class FakeEngine:
    """The engine's side of the index: a set and its sequence, changed as an engine does (see BlocksChanged)."""

    def __init__(self) -> None:
        self.sequence = 0
        self.held: set[BlockHash] = set()
        self.announcer: WorkerAnnouncer | None = None

    def snapshot(self) -> tuple[int, frozenset[BlockHash]]:
        return self.sequence, frozenset(self.held)

    def change(self, stored: set[BlockHash], removed: set[BlockHash] = frozenset()) -> None:  # type: ignore[assignment]
        self.held = (self.held - removed) | stored
        self.sequence += 1
        if self.announcer is not None:
            self.announcer.block_change(self.sequence, tuple(stored), tuple(removed))

    def churn(self, random_source: random.Random, universe: int = 200) -> None:
        """Some blocks come, some go."""
        stored = {block(random_source.randrange(universe)) for _ in range(random_source.randrange(5))} - self.held
        removed = set(random_source.sample(sorted(self.held), min(len(self.held), random_source.randrange(4))))
        self.change(stored, removed)


@contextlib.asynccontextmanager
async def announcing(
    url: str, engine: FakeEngine, worker_record: WorkerRecord | None = None, *, ttl_ms: int = 2000, **options: int
) -> AsyncIterator[WorkerAnnouncer]:
    """An announcer at work for `engine`; at the end it stops as by kill -9: without a word."""
    announcer = WorkerAnnouncer(url, worker_record or record(), engine.snapshot, ttl_ms=ttl_ms, **options)
    engine.announcer = announcer
    task = asyncio.create_task(announcer.run())
    try:
        yield announcer
    finally:
        engine.announcer = None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    """Return once `condition` holds; TimeoutError if it does not within the deadline."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is in another process
            await asyncio.sleep(0.01)
