"""A house of real processes for tests that harm its block index: Valkey, workers and two gateways under steady load.

Workers and gateways reach Valkey through a proxy each. `Conversations` asks: several clients whose prompts grow turn by
turn, each turn through the next gateway that serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
from antiphon_kvtransfer.identity import BlockHash, contents_digest

from tests.support.lagging_replica import port_of
from tests.support.tcp_proxy import TcpProxy
from tests.support.valkey import Valkey
from tests.support.workers import WorkerProcess, Workers, prompt_of

START_DEADLINE_S = 60.0
ANSWER_DEADLINE_S = 60.0


class GatewayProcess:
    """One `antiphon gateway` process."""

    def __init__(self, folder: Path, name: str, redis_url: str, *options: str) -> None:
        self.name = name
        self._options = options
        self._ready = folder / f"{name}.json"
        self._log = folder / f"{name}.log"
        self._redis_url = redis_url
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""
        self.client = httpx.AsyncClient(timeout=ANSWER_DEADLINE_S, trust_env=False)
        self.serving = False
        """Clients may use it."""

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    async def start(self, *, decode_workers: int) -> None:
        """Start it and wait until it can use so many workers that decode."""
        self._ready.unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANTIPHON_", "OTEL_"))}
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "antiphon", "gateway", "--port", "0", "--redis-url", self._redis_url),
                *("--ready-file", str(self._ready), *self._options),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        async with asyncio.timeout(START_DEADLINE_S):
            while not self._ready.exists():
                assert self._process.returncode is None, self.log
                await asyncio.sleep(0.02)
            self.url = f"http://{json.loads(self._ready.read_bytes())['address']}"
            while not await self._has(decode_workers):  # noqa: ASYNC110 - it is in another process
                await asyncio.sleep(0.05)
        self.serving = True

    async def _has(self, decode_workers: int) -> bool:
        page = (await self.client.get(f"{self.url}/ready")).json()
        return any(model["decode"] + model["both"] >= decode_workers for model in page["models"].values())

    async def stop(self) -> None:
        """In good order: no client is sent here any more, those who are here get their answers."""
        assert self._process is not None
        self.serving = False
        self._process.terminate()
        async with asyncio.timeout(START_DEADLINE_S):
            assert await self._process.wait() == 0, self.log

    async def kill(self) -> None:
        await self.client.aclose()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def get(self, path: str) -> dict[str, Any]:
        answer = await self.client.get(f"{self.url}{path}")
        assert answer.status_code == 200, answer.text
        page: dict[str, Any] = answer.json()
        return page

    async def complete(self, model: str, prompt: Sequence[int]) -> httpx.Response:
        body = {"model": model, "prompt": list(prompt), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        return await self.client.post(f"{self.url}/v1/completions", json=body)


class IndexHouse:
    """`async with IndexHouse(folder, options) as house:` starts Valkey and the proxies, and ends all that is in it."""

    def __init__(self, folder: Path, *worker_options: str) -> None:
        self._folder = folder
        self._worker_options = worker_options
        self._stack = AsyncExitStack()
        self.valkey = Valkey()
        self.gateways: list[GatewayProcess] = []
        self.workers: dict[str, WorkerProcess] = {}
        self.to_workers: TcpProxy
        self.to_gateways: TcpProxy
        self.model = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(self.valkey)
            self.to_workers = await stack.enter_async_context(TcpProxy(port_of(self.valkey)))
            self.to_gateways = await stack.enter_async_context(TcpProxy(port_of(self.valkey)))
            url = f"redis://127.0.0.1:{self.to_workers.port}/0"
            self._workers = await stack.enter_async_context(
                Workers(self._folder, *self._worker_options, "--redis-url", url)
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self, roles: dict[str, str], *, gateways: int) -> None:
        """Workers by id with their roles, then the gateways."""
        started = await asyncio.gather(*(self.start_worker(name, role) for name, role in roles.items()))
        decoding = sum(worker.ready.role != "prefill" for worker in started)
        url = f"redis://127.0.0.1:{self.to_gateways.port}/0"
        for number in range(gateways):
            gateway = GatewayProcess(self._folder, f"gateway-{number}", url)
            self._stack.push_async_callback(gateway.kill)
            self.gateways.append(gateway)
        await asyncio.gather(*(gateway.start(decode_workers=decoding) for gateway in self.gateways))
        self.model = (await self.gateways[0].get("/v1/models"))["data"][0]["id"]

    async def start_worker(self, worker_id: str, role: str) -> WorkerProcess:
        worker = self.workers[worker_id] = await self._workers.start("--worker-id", worker_id, "--role", role)
        return worker

    def move_to(self, server: Valkey) -> None:
        """The address of Valkey moves to another server, which the caller ends."""
        self.valkey = server
        self.to_workers.point_at(port_of(server))
        self.to_gateways.point_at(port_of(server))

    async def keep(self, context: contextlib.AbstractAsyncContextManager[Any]) -> Any:
        """Something that ends with the house."""
        return await self._stack.enter_async_context(context)

    async def until_indexes_are_true(self, *, from_s: float, deadline_s: float) -> None:
        """Each gateway's mirror is each worker's own set, block by block: seen equal once in the time between `from_s`
        and `deadline_s` from now, and never unequal at the same change of the same incarnation."""
        ends_at = time.monotonic() + deadline_s
        await asyncio.sleep(from_s)
        missing = {(gateway.name, worker) for gateway in self.gateways for worker in self.workers}
        seen: dict[tuple[str, str], str] = {}
        while missing:
            for worker_id, worker in self.workers.items():
                page = json.loads(await worker.page("/blocks"))
                true = (page["incarnation"], page["sequence"])
                assert page["digest"] == contents_digest(BlockHash(bytes.fromhex(block)) for block in page["blocks"])
                for gateway in self.gateways:
                    if (gateway.name, worker_id) not in missing:
                        continue
                    found = (await gateway.get("/v1/antiphon/index"))["workers"].get(worker_id)
                    if found is None or (found["incarnation"], found["sequence"]) != true:
                        seen[gateway.name, worker_id] = f"{found}, the worker is at {true}"
                        continue
                    known = await gateway.get(f"/v1/antiphon/index/{worker_id}")
                    if (known["incarnation"], known["sequence"]) == true:
                        assert known["digest"] == page["digest"], (gateway.name, worker_id, known, len(page["blocks"]))
                        missing.discard((gateway.name, worker_id))
            assert not missing or time.monotonic() < ends_at, {pair: seen.get(pair) for pair in missing}

    async def sets_loaded(self) -> list[int]:
        """How many whole sets each gateway has loaded since it was started."""
        return [(await gateway.get("/v1/antiphon/index"))["sets_loaded"] for gateway in self.gateways]


@dataclass
class Conversations:
    """Clients that ask all the time, each a conversation of a few turns after the other."""

    house: IndexHouse
    lanes: int
    turns: int = 6
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def going_on(self) -> AsyncIterator[Self]:
        async with asyncio.TaskGroup() as group:
            for lane in range(self.lanes):
                group.create_task(self._talk(lane))
            try:
                yield self
            finally:
                self._stop.set()

    async def until_answered(self, more: int) -> None:
        goal = self.answered + more
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            while self.answered < goal:  # noqa: ASYNC110 - whoever answers is in another process
                await asyncio.sleep(0.02)

    async def _talk(self, lane: int) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            prompt = prompt_of(100, seed=lane * 1000 + number)
            for turn in range(self.turns):
                if self._stop.is_set():
                    return
                serving = [gateway for gateway in self.house.gateways if gateway.serving]
                gateway = serving[(lane + turn) % len(serving)]
                try:
                    answer = await gateway.complete(self.house.model, prompt)
                    if answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 6:
                        self.answered += 1
                    else:
                        self.failures.append(f"{gateway.name}: {answer.status_code} {answer.text[:300]}")
                except httpx.HTTPError as error:
                    self.failures.append(f"{gateway.name}: {type(error).__name__}: {error}")
                prompt = [*prompt, *prompt_of(70, seed=lane * 1000 + number + 31 * turn)]
                # A person reads: between answers the sets rest, so that pages can be compared.
                await asyncio.sleep(0.15)
