"""A gateway's mirror alone in a process, and beside it one worker that says how old the mirror's news is."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
from typing import Any

import psutil
import uvloop
from antiphon_kvtransfer.announcer import WorkerAnnouncer
from antiphon_kvtransfer.cluster import ClusterMirror
from antiphon_kvtransfer.identity import BlockHash

from benchmarks.index_redis.child import answer_lines, cpu_s
from benchmarks.index_redis.fleet import digest_of, record_of

_LOOP_TICK_S = 0.002
_NEWS_EVERY_S = 0.2


class Probe:
    """Holds one block at a time; measures how long the mirror takes to know each of them."""

    def __init__(self, mirror: ClusterMirror, model: str) -> None:
        self._mirror = mirror
        self._model = model
        self._block = BlockHash(os.urandom(16))
        self._sequence = 1
        self.ages_ms: list[float] = []

    def snapshot(self) -> tuple[int, frozenset[BlockHash]]:
        return self._sequence, frozenset({self._block})

    async def run(self, redis: str) -> None:
        writer = WorkerAnnouncer(redis, record_of("w999999", self._model, 1), self.snapshot)
        async with asyncio.TaskGroup() as group:
            group.create_task(writer.run())
            loop = asyncio.get_running_loop()
            while True:
                await asyncio.sleep(_NEWS_EVERY_S)
                old, self._block = self._block, BlockHash(os.urandom(16))
                self._sequence += 1
                told = loop.time()
                writer.block_change(self._sequence, [self._block], [old])
                while not self._mirror.blocks.leading_blocks(self._model, [self._block]):  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(_LOOP_TICK_S)
                self.ages_ms.append((loop.time() - told) * 1000)


async def main(redis: str, model: str) -> None:
    mirror = ClusterMirror(redis, on_change=lambda: None)
    probe = Probe(mirror, model)
    pauses_ms: list[float] = []

    async def watch_the_loop() -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_LOOP_TICK_S)
            pauses_ms.append((loop.time() - before - _LOOP_TICK_S) * 1000)

    async def answer(asked: dict[str, Any]) -> Any:
        match asked["ask"]:
            case "digests":
                found = {}
                for worker_id in mirror.workers():
                    position = mirror.blocks.position(model, worker_id)
                    digest = digest_of(mirror.blocks.contents(model, worker_id))
                    found[worker_id] = (position.sequence if position else -1, digest)
                    await asyncio.sleep(0)
                pauses_ms.clear()
                return found
            case "state":
                state = {
                    "cpu_s": cpu_s(),
                    "rss_bytes": psutil.Process().memory_info().rss,
                    "workers": len(mirror.workers()),
                    "pairs": mirror.blocks.blocks,
                    "healthy": mirror.healthy,
                    "counters": dataclasses.asdict(mirror.counters),
                    "pauses_ms": sorted(pauses_ms)[-5:],
                    "ages_ms": list(probe.ages_ms),
                }
                if asked.get("forget"):
                    pauses_ms.clear()
                    probe.ages_ms.clear()
                return state
        return None

    async with asyncio.TaskGroup() as group:
        group.create_task(mirror.run())
        group.create_task(probe.run(redis))
        group.create_task(watch_the_loop())
        await answer_lines(answer)
        raise SystemExit


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis", required=True)
    parser.add_argument("--model", required=True)
    uvloop.run(main(**vars(parser.parse_args())))
