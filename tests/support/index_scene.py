"""The block index at work, for tests that harm it: a Valkey, workers that change all the time, a gateway's mirror.

Workers and mirror reach the server through a proxy each, so that either side alone can be held up, cut off, or moved
to another server. `until_true` compares block by block with what each worker's engine held *at the sequence that the
mirror is at*, so it needs no pause of the changes, and a mirror that is right only by chance does not pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

import redis
from antiphon_kvtransfer.cluster import ClusterMirror, MirrorCounters
from antiphon_kvtransfer.identity import BlockHash
from antiphon_kvtransfer.keys import ModelKeys

from tests.support.lagging_replica import LaggingReplica, port_of, replica_of
from tests.support.membership import FakeEngine, announcing, block, record, until
from tests.support.tcp_proxy import TcpProxy
from tests.support.valkey import Valkey

KEYS = ModelKeys("demo")
TTL_MS = 2000
LOOK_MS = 500
_SEQUENCES_KEPT = 1000
STALENESS_S = 5.0
"""What the product promises. The longest way back is a command that is given up (1 s), a pause before the next session
(at most 1 s), a heartbeat that finds the loss (TTL / 4) and a look: 3 s here, 4.25 s with the options' defaults."""
START_DEADLINE_S = 60.0


class ChangingEngine(FakeEngine):
    """Remembers what it held at each of its last sequences. What it tells is one value, so another thread that takes a
    snapshot never sees it torn."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.held_at: dict[int, frozenset[BlockHash]] = {}
        self._universe = [block(number) for number in range(max(200, 2 * blocks))]
        self._state: tuple[int, frozenset[BlockHash]] = (0, frozenset())
        self.change(set(self._universe[:blocks]))

    def snapshot(self) -> tuple[int, frozenset[BlockHash]]:
        return self._state

    def change(self, stored: set[BlockHash], removed: set[BlockHash] = frozenset()) -> None:  # type: ignore[assignment]
        sequence, held = self.sequence + 1, frozenset((self.held - removed) | stored)
        self._state = (sequence, held)
        self.held_at[sequence] = held
        self.held_at.pop(sequence - _SEQUENCES_KEPT, None)
        super().change(stored, removed)

    def churn(self, random_source: random.Random, universe: int = 0) -> None:
        """Some blocks come, some go."""
        touched = set(random_source.sample(self._universe, random_source.randrange(1, 8)))
        self.change(touched - self.held, touched & self.held)


class Scene:
    """`async with Scene() as scene:` gives workers w0, w1, ... that change, and a mirror that knows them."""

    def __init__(self, *, workers: int = 3, blocks: int = 0, seed: int = 1) -> None:
        """`blocks`: what each worker holds from the beginning, besides what comes and goes."""
        self.engines: dict[str, ChangingEngine] = {}
        self.server = Valkey()
        self._workers = workers
        self._blocks = blocks
        self._source = random.Random(seed)
        self._stack = AsyncExitStack()
        self._lives: dict[str, AsyncExitStack] = {}
        self._incarnations: dict[str, int] = {}
        self._mirroring = AsyncExitStack()
        self._knew_all = False
        self._changing = asyncio.Event()
        self._changing.set()
        self.mirror: ClusterMirror
        self.to_workers: TcpProxy
        self.to_mirror: TcpProxy
        self.fewest_workers = workers
        """The fewest that a mirror that had known all of them ever knew later."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(self.server)
            self.to_workers = await stack.enter_async_context(TcpProxy(port_of(self.server)))
            self.to_mirror = await stack.enter_async_context(TcpProxy(port_of(self.server)))
            stack.push_async_callback(self._end)
            for number in range(self._workers):
                await self.start_worker(f"w{number}")
            changing = asyncio.create_task(self._change())
            stack.push_async_callback(_cancel, changing)
            await self.start_gateway()
            # Not yet what is to be shown: on a busy machine it may take its time.
            await self.until_true(deadline_s=START_DEADLINE_S)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # -- the parts

    async def start_worker(self, worker_id: str) -> None:
        """A new incarnation: an empty pool, and sequence numbers from the beginning."""
        number = self._incarnations[worker_id] = self._incarnations.get(worker_id, 0) + 1
        engine = self.engines[worker_id] = ChangingEngine(self._blocks)
        life = self._lives[worker_id] = AsyncExitStack()
        about = record(worker_id, f"i{number}", started_at_ms=number)
        await life.enter_async_context(announcing(url_of(self.to_workers), engine, about, ttl_ms=TTL_MS))

    async def kill_worker(self, worker_id: str) -> None:
        """As by kill -9."""
        await self._lives[worker_id].aclose()

    async def start_gateway(self) -> None:
        mirror = ClusterMirror(url_of(self.to_mirror), on_change=self._count_workers, look_ms=LOOK_MS)
        self.mirror = mirror
        running = asyncio.create_task(mirror.run())
        self._mirroring.push_async_callback(_cancel, running)
        await until(lambda: len(mirror.workers()) == self._workers, deadline_s=START_DEADLINE_S)
        self._knew_all = True

    async def kill_gateway(self) -> None:
        await self._mirroring.aclose()
        self._mirroring = AsyncExitStack()
        self._knew_all = False

    def move_to(self, server: Valkey) -> None:
        """The address at which Valkey is found moves to another server."""
        self.server = server
        self.to_workers.point_at(port_of(server))
        self.to_mirror.point_at(port_of(server))

    async def replica(self) -> LaggingReplica:
        """Of the server, in step with it; ended with the scene."""
        return await self._stack.enter_async_context(replica_of(self.server))

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """Straight to the server that is used now."""
        with self.client_of(self.server) as client:
            yield client

    @contextlib.contextmanager
    def client_of(self, server: Valkey) -> Iterator[Any]:
        with redis.Redis.from_url(server.url, protocol=2) as client:
            yield client

    # -- time

    def rest(self) -> None:
        """The engines change nothing more until `go_on`."""
        self._changing.clear()

    def go_on(self) -> None:
        self._changing.set()

    async def until_looked(self) -> None:
        """A look that began after this call is over."""
        looks = self.mirror.counters.looks
        await until(lambda: self.mirror.counters.looks >= looks + 2)

    def counted(self) -> MirrorCounters:
        return dataclasses.replace(self.mirror.counters)

    async def until_changed(self, changes: int) -> None:
        """Each worker's set changed so many times more."""
        wanted = {worker: engine.sequence + changes for worker, engine in self.engines.items()}
        await until(
            lambda: all(self.engines[worker].sequence >= goal for worker, goal in wanted.items()),
            deadline_s=START_DEADLINE_S,
        )

    async def until_true(self, deadline_s: float = STALENESS_S) -> None:
        """The mirror knows each worker at least as it is now, block by block; while the workers go on changing."""
        goals = {worker: engine.sequence for worker, engine in self.engines.items()}
        last: dict[str, str] = {}
        try:
            await until(lambda: self._differences(goals, last) == {}, deadline_s=deadline_s)
        except TimeoutError:
            raise AssertionError(f"the mirror differs from the workers after {deadline_s:.1f} s: {last}") from None

    def _differences(self, goals: Mapping[str, int], last: dict[str, str]) -> dict[str, str]:
        last.clear()
        for worker, goal in goals.items():
            position = self.mirror.blocks.position("demo", worker)
            if position is None or position.incarnation != f"i{self._incarnations[worker]}":
                last[worker] = f"at {position}"
            elif position.sequence < goal:
                last[worker] = f"at {position.sequence}, the worker was at {goal}"
            else:
                found = self.mirror.blocks.contents("demo", worker)
                true = self.engines[worker].held_at[position.sequence]
                if found != true:
                    last[worker] = f"{len(found - true)} blocks too many, {len(true - found)} missing"
        return last

    async def _change(self) -> None:
        while True:
            await self._changing.wait()
            for engine in self.engines.values():
                engine.churn(self._source)
            await asyncio.sleep(0.005)

    def _count_workers(self) -> None:
        if self._knew_all:
            self.fewest_workers = min(self.fewest_workers, len(self.mirror.workers()))

    async def _end(self) -> None:
        await self.kill_gateway()
        for life in self._lives.values():
            await life.aclose()


def url_of(proxy: TcpProxy) -> str:
    return f"redis://127.0.0.1:{proxy.port}/0"


async def _cancel(task: asyncio.Task[None]) -> None:
    assert not task.done(), f"{task.get_coro()} ended by itself: {task.exception()!r}"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
