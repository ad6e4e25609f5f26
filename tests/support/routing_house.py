"""A Valkey, workers and several gateways as real processes, some that route by cost and some that take turns.

All gateways use the same workers, so one house serves runs of either kind, one after the other.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import grpc.aio
import httpx
from antiphon_gateway.models import Model
from antiphon_proto import worker_pb2 as wire
from antiphon_proto.worker_pb2_grpc import WorkerStub

from tests.support.index_house import START_DEADLINE_S, GatewayProcess
from tests.support.valkey import Valkey
from tests.support.workers import MAX_MESSAGE_BYTES, WorkerProcess, Workers


class RoutingHouse:
    """`async with RoutingHouse(folder, worker options) as house:`, then `start`. All ends with the block."""

    def __init__(self, folder: Path, *worker_options: str) -> None:
        self._folder = folder
        self._worker_options = worker_options
        self._stack = AsyncExitStack()
        self.gateways: dict[str, GatewayProcess] = {}
        self.workers: list[WorkerProcess] = []
        self.model: Model
        self.client = httpx.AsyncClient(timeout=300, trust_env=False, limits=httpx.Limits(max_connections=200))

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.client.aclose)
            self._valkey = stack.enter_context(Valkey(unix=True))
            options = (*self._worker_options, "--redis-url", self._valkey.url)
            self._workers = await stack.enter_async_context(Workers(self._folder, *options))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self, *, prefill: int, decode: int, by_cost: int, in_turn: int) -> None:
        """So many workers of each role, and so many gateways of each routing, that know all of them.

        Gateways are called cost-0, cost-1 and so on, and round-robin-0.
        """
        roles = [("prefill", number) for number in range(prefill)] + [("decode", number) for number in range(decode)]
        starting = min(len(roles), 2 * (os.cpu_count() or 1))
        gate = asyncio.Semaphore(starting)

        async def worker(role: str, number: int) -> WorkerProcess:
            async with gate:
                return await self._workers.start("--role", role, "--worker-id", f"{role}-{number}")

        self.workers = list(await asyncio.gather(*(worker(role, number) for role, number in roles)))
        names = [("cost", number) for number in range(by_cost)] + [("round-robin", number) for number in range(in_turn)]
        await asyncio.gather(*(self._start_gateway(routing, number, prefill, decode) for routing, number in names))
        self.model = await self._model()

    def by_cost(self, count: int) -> list[GatewayProcess]:
        return [self.gateways[f"cost-{number}"] for number in range(count)]

    def in_turn(self, count: int) -> list[GatewayProcess]:
        return [self.gateways[f"round-robin-{number}"] for number in range(count)]

    async def _start_gateway(self, routing: str, number: int, prefill: int, decode: int) -> None:
        name = f"{routing}-{number}"
        gateway = GatewayProcess(self._folder, name, self._valkey.url, "--routing", routing)
        self._stack.push_async_callback(gateway.kill)
        self.gateways[name] = gateway
        await gateway.start(decode_workers=decode)
        async with asyncio.timeout(START_DEADLINE_S):
            while await _prefill_workers(gateway) < prefill:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.05)

    async def _model(self) -> Model:
        """As a gateway loads it from a worker's card."""
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        async with grpc.aio.insecure_channel(self.workers[0].ready.address, options=options) as channel:
            card = await WorkerStub(channel).GetModelCard(wire.GetModelCardRequest(), timeout=START_DEADLINE_S)
        return await asyncio.to_thread(Model, card)


async def _prefill_workers(gateway: GatewayProcess) -> int:
    return sum(model["prefill"] for model in (await gateway.get("/ready"))["models"].values())
