"""Many announcers in one process, each with a pool that is full: as many blocks go as come."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import os
import threading
from collections import deque
from typing import Any

import uvloop
from antiphon_kvtransfer.announcer import WorkerAnnouncer
from antiphon_kvtransfer.identity import BlockHash
from antiphon_kvtransfer.records import WorkerRecord

from benchmarks.index_redis.child import answer_lines, cpu_s

_TICK_S = 0.01
BLOCKS_A_CHANGE = 2


class FullPool:
    """The engine's side: the oldest blocks go when new ones come."""

    def __init__(self, blocks: int) -> None:
        self._lock = threading.Lock()
        self._held = deque(BlockHash(os.urandom(16)) for _ in range(blocks))
        self.sequence = 1
        self.announcer: WorkerAnnouncer | None = None

    def snapshot(self) -> tuple[int, frozenset[BlockHash]]:
        with self._lock:
            return self.sequence, frozenset(self._held)

    def change(self) -> None:
        with self._lock:
            removed = [self._held.popleft() for _ in range(BLOCKS_A_CHANGE)]
            stored = [BlockHash(os.urandom(16)) for _ in range(BLOCKS_A_CHANGE)]
            self._held.extend(stored)
            self.sequence += 1
        assert self.announcer is not None
        self.announcer.block_change(self.sequence, stored, removed)


class GivenUp(logging.Handler):
    """Counts the outages of which announcers say that an answer took too long: each says so once per outage."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "no answer within" in record.getMessage()


def record_of(worker_id: str, model: str, blocks: int) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        incarnation=os.urandom(16).hex(),
        role="both",
        role_version=1,
        model=model,
        card_digest="0" * 64,
        address=f"10.0.0.1:{worker_id[1:]}",
        status_address=f"10.0.0.1:{worker_id[1:]}",
        total_blocks=blocks,
        block_tokens=64,
        started_at_ms=1,
    )


def digest_of(hashes: frozenset[BlockHash]) -> str:
    return hashlib.sha256(b"".join(sorted(hashes))).hexdigest()


async def main(redis: str, model: str, first: int, count: int, blocks: int) -> None:
    pools = {f"w{number}": FullPool(blocks) for number in range(first, first + count)}
    wanted_per_s = 0.0

    given_up = GivenUp()
    membership = logging.getLogger("antiphon.membership")
    membership.addHandler(given_up)
    membership.setLevel(logging.WARNING)
    membership.propagate = False

    async def change() -> None:
        loop = asyncio.get_running_loop()
        turn, owed, last = 0, 0.0, loop.time()
        order = list(pools.values())
        while True:
            await asyncio.sleep(_TICK_S)
            owed += (loop.time() - last) * wanted_per_s
            last = loop.time()
            while owed >= 1:
                owed -= 1
                order[turn % count].change()
                turn += 1

    async def answer(asked: dict[str, Any]) -> Any:
        nonlocal wanted_per_s
        match asked["ask"]:
            case "change":
                wanted_per_s = asked["per_s"]
            case "digests":
                found = {worker: pool.snapshot() for worker, pool in pools.items()}
                return {worker: (sequence, digest_of(held)) for worker, (sequence, held) in found.items()}
            case "state":
                writers = [pool.announcer for pool in pools.values() if pool.announcer is not None]
                return {
                    "cpu_s": cpu_s(),
                    "healthy": sum(writer.healthy for writer in writers),
                    "given_up": given_up.count,
                    "republished": sum(writer.republished for writer in writers),
                    "changes": sum(pool.sequence for pool in pools.values()),
                }
        return None

    async with asyncio.TaskGroup() as group:
        for worker_id, pool in pools.items():
            writer = WorkerAnnouncer(redis, record_of(worker_id, model, blocks), pool.snapshot)
            pool.announcer = writer
            group.create_task(writer.run())
        group.create_task(change())
        await answer_lines(answer)
        raise SystemExit


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    uvloop.run(main(**vars(parser.parse_args())))
