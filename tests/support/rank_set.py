"""Rank processes for tests: started once, then one model and shape after the other runs in them.

Importing torch and transformers takes seconds, loading a tiny model a fraction of one. So all rank processes are
forked from one that has imported them, and a `RankSet` keeps its processes: it loads one model after the other into as
many of them as a shape has ranks. `RankSetExecutor` drives them like any executor.
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from antiphon_engine.executor import Executor, SampledToken, SequenceStep, row_specs, step_results
from antiphon_engine.interface import KvMemory, ModelInfo
from antiphon_engine.parallel import ParallelShape
from antiphon_engine.torch_engine.parallel.groups import Groups, join_groups
from antiphon_engine.torch_engine.parallel.runner import RankRunner, RankSettings
from antiphon_engine.torch_engine.step_batch import StepBatch, build_batch

NUM_BLOCKS = 64
ANSWER_S = 60.0
"""Far more than anything here takes."""


class RankFailed(Exception):
    """What a rank raised, as text."""


class RankProcess:
    """The inside of a rank process: what it was told to load."""

    def __init__(self) -> None:
        self.groups: Groups | None = None
        self.runner: RankRunner | None = None

    def load(
        self,
        settings: RankSettings,
        port: int,
        listening: socket.socket | None,
        timeout_s: float,
        collective_timeout_s: float | None,
    ) -> ModelInfo:
        self.unload()
        self.groups = join_groups(
            settings.shape,
            settings.rank,
            "127.0.0.1",
            port,
            timeout_s,
            collective_timeout_s=collective_timeout_s,
            listening=listening,
        )
        self.runner = RankRunner(settings, self.groups)
        return self.runner.info

    def step(self, *arguments: Any) -> list[SampledToken] | None:
        assert self.runner is not None
        return self.runner.step(*arguments)

    def unload(self) -> None:
        if self.runner is not None:
            self.runner.close()
        if self.groups is not None:
            self.groups.close()
        self.runner = self.groups = None


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    process = RankProcess()
    while (command := connection.recv()) is not None:
        function, arguments = command
        try:
            connection.send((function(process, *arguments), None))
        except Exception as error:  # noqa: BLE001 - the test's process raises it
            connection.send((None, f"{type(error).__name__}: {error}"))
    process.unload()


class RankSet:
    """Processes that wait for calls."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["antiphon_engine.torch_engine.parallel.runner"])
        self.processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._connections.append(ours)

    def call(self, rank: int, function: Callable[..., Any], *arguments: Any) -> None:
        """function(RankProcess, *arguments) in the rank's process; `answer` has what it returns."""
        self._connections[rank].send((function, arguments))

    def answer(self, rank: int) -> Any:
        if not self._connections[rank].poll(ANSWER_S):
            raise TimeoutError(f"rank {rank} did not answer")
        value, error = self._connections[rank].recv()
        if error is not None:
            raise RankFailed(f"rank {rank}: {error}")
        return value

    def load(self, folder: Path, shape: ParallelShape, **how: Any) -> RankSetExecutor:
        """The model on the first ranks of this set; `how` as in `load_with`."""
        infos = self.load_with(RankProcess.load, folder, shape, **how)
        assert len({info.revision for info in infos}) == 1
        return RankSetExecutor(self, shape, infos[0], how.get("num_blocks", NUM_BLOCKS))

    def load_with(
        self,
        function: Callable[..., Any],
        folder: Path,
        shape: ParallelShape,
        *,
        num_blocks: int = NUM_BLOCKS,
        block_tokens: int = 16,
        dtype: str = "float32",
        kernels: bool = True,
        timeout_s: float = 60.0,
        collective_timeout_s: float | None = None,
    ) -> list[Any]:
        """What `function`, called like `RankProcess.load`, returns on each rank of the shape."""
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            for rank in range(shape.ranks):
                settings = RankSettings(
                    folder, shape, rank, dtype, num_blocks, block_tokens, threads=1, kernels=kernels
                )
                first = listening if rank == 0 else None
                port = listening.getsockname()[1]
                self.call(rank, function, settings, port, first, timeout_s, collective_timeout_s)
            return [self.answer(rank) for rank in range(shape.ranks)]

    def unload(self, ranks: int) -> None:
        """Let the first `ranks` processes forget their models and leave their groups."""
        for rank in range(ranks):
            self.call(rank, RankProcess.unload)
        for rank in range(ranks):
            self.answer(rank)

    def close(self) -> None:
        for process, connection in zip(self.processes, self._connections, strict=True):
            if process.is_alive():
                connection.send(None)
        for process in self.processes:
            process.join(ANSWER_S)
            process.kill()


class RankSetExecutor(Executor):
    """Steps on all ranks of a shape."""

    def __init__(self, ranks: RankSet, shape: ParallelShape, info: ModelInfo, num_blocks: int) -> None:
        self._ranks = ranks
        self._shape = shape
        self._info = info
        self._num_blocks = num_blocks

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def kv(self) -> KvMemory:
        raise NotImplementedError("each rank has its own")

    def batch(self, step: Sequence[SequenceStep]) -> StepBatch:
        return build_batch(
            step,
            block_tokens=self._info.block_tokens,
            num_blocks=self._num_blocks,
            vocab_size=self._info.vocab_size,
            max_context_tokens=self._info.max_context_tokens,
        )

    def start(self, step: Sequence[SequenceStep]) -> None:
        """Give a step to all ranks; `finish` waits for it."""
        batch = self.batch(step)
        specs = row_specs(step)
        for rank in range(self._shape.ranks):
            self._ranks.call(rank, RankProcess.step, batch, specs if rank == self._shape.sampling_rank else [])

    def finish(self, step: Sequence[SequenceStep]) -> list[SampledToken | None]:
        answers = [self._ranks.answer(rank) for rank in range(self._shape.ranks)]
        assert [rank for rank, answer in enumerate(answers) if answer is not None] == [self._shape.sampling_rank]
        return step_results(step, answers[self._shape.sampling_rank])

    def execute(self, step: Sequence[SequenceStep]) -> list[SampledToken | None]:
        self.start(step)
        return self.finish(step)

    def close(self) -> None:
        self._ranks.unload(self._shape.ranks)


@contextmanager
def rank_set(size: int) -> Iterator[RankSet]:
    ranks = RankSet(size)
    try:
        yield ranks
    finally:
        ranks.close()
