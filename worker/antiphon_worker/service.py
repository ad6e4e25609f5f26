"""What a role sees of the worker process that it is part of, and what the process asks of a role."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from antiphon_engine.interface import Engine
from antiphon_kvtransfer.identity import ChainRoot, chain_root
from antiphon_kvtransfer.links import PeerLinks
from tokenizers import Tokenizer

from antiphon_worker.bridge import EngineBridge
from antiphon_worker.channels import ChannelPool
from antiphon_worker.identity import WorkerIdentity
from antiphon_worker.load import LoadReport
from antiphon_worker.metrics import WorkerMetrics
from antiphon_worker.options import WorkerOptions
from antiphon_worker.role import CurrentRole


class Drain:
    """Whether the worker takes nothing new any more."""

    def __init__(self) -> None:
        self._on = False
        self.on_begin: list[Callable[[], None]] = []
        """Called when it begins."""

    @property
    def on(self) -> bool:
        return self._on

    def begin(self) -> None:
        self._on = True
        for told in self.on_begin:
            told()


class TaskOwner:
    """Owns tasks that outlive the call that starts them: each is awaited, or cancelled and awaited, by `close`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The parts of one worker process, made and closed by `runtime`."""

    options: WorkerOptions
    identity: WorkerIdentity
    role: CurrentRole
    engine: Engine
    bridge: EngineBridge
    links: PeerLinks
    tokenizer: Tokenizer
    load: LoadReport
    channels: ChannelPool
    metrics: WorkerMetrics
    drain: Drain = field(default_factory=Drain)
    hardware: str = ""
    """What steps are computed by (`hardware`): a worker that says the same is as fast. Empty: not known."""

    @property
    def block_tokens(self) -> int:
        return self.engine.info.block_tokens

    @property
    def chunk_blocks(self) -> int:
        """Blocks of one prompt chunk, at least one."""
        return max(1, self.options.max_batch_tokens // self.block_tokens)

    @property
    def heartbeat_s(self) -> float:
        return self.options.heartbeat_ms / 1000.0

    @property
    def lost_after_s(self) -> float:
        return self.options.lost_after_ms / 1000.0

    def root(self, cache_salt: bytes) -> ChainRoot:
        """The parent of the first block of every prompt with this salt."""
        info = self.engine.info
        return chain_root(
            model=info.model, revision=info.revision, adapter=info.adapter, kv_format=info.kv_format, salt=cache_salt
        )


class WorkerService(ABC):
    """One role's part of a worker process. Every process has all of them; each refuses what is not its role's."""

    @abstractmethod
    def register(self, server: grpc.aio.Server) -> None:
        """Add its gRPC services, before the server starts."""

    @property
    @abstractmethod
    def active_requests(self) -> int:
        """Requests that a drain waits for."""

    @abstractmethod
    async def drained(self) -> None:
        """Return once there is no active request."""

    @abstractmethod
    def give_back(self, why: str) -> None:
        """Whoever asked for what still runs is told to have it done elsewhere."""

    @abstractmethod
    def break_off(self, reason: str) -> None:
        """End the streams that the server has open for it. Called once, before the server stops."""

    @property
    @abstractmethod
    def open_tasks(self) -> int:
        """Tasks it owns now."""

    @abstractmethod
    def status(self) -> Mapping[str, object]:
        """Its part of the status page."""

    @abstractmethod
    async def close(self) -> None:
        """End all requests and tasks."""


ServiceFactory = Callable[[WorkerContext], WorkerService]
