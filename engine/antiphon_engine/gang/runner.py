"""What a rank process runs: the seam between the gang (processes, sockets) and the compute of one rank.

A gang is told the name of a `RankMaker`, as `module:callable`, and makes one in every rank's process: for the torch
engine `torch_ranks`, in tests something that needs no model.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from antiphon_kvtransfer.plane import KvPart

from antiphon_engine.executor import RowSpec, SampledToken
from antiphon_engine.interface import KvMemory, ModelInfo
from antiphon_engine.parallel import ParallelShape
from antiphon_engine.torch_engine.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks meet to form their groups."""

    host: str
    port: int
    own_address: str
    """Where this rank's peers reach it."""
    listening: socket.socket | None
    """Rank 0's: bound to `port`."""
    timeout_s: float


class Runner(Protocol):
    """One rank's part of every step. Used from one thread, but for `info`, `kv` and `part`."""

    @property
    def info(self) -> ModelInfo:
        """Of the whole model; the same on all ranks."""
        ...

    @property
    def kv(self) -> KvMemory:
        """The rank's own part of each block."""
        ...

    @property
    def part(self) -> KvPart: ...

    @property
    def exchanged_s(self) -> float:
        """Of all steps so far, the time spent on exchanges with other ranks, waiting for them included."""
        ...

    def step(self, batch: StepBatch, specs: Sequence[RowSpec]) -> list[SampledToken] | None:
        """One token for each wanted row; None on all ranks but the sampling one, which alone gets `specs`."""
        ...

    def close(self) -> None: ...


class RankMaker(Protocol):
    def possible_blocks(self, ranks_here: int) -> int:
        """How many KV blocks this rank could hold, where its machine has so many ranks. Before anything is loaded."""
        ...

    def make(self, num_blocks: int, meeting: Meeting) -> Runner:
        """Meet the other ranks, load, and be ready for steps. An error with an `exit_code` is told as it is."""
        ...


MakerFactory = Callable[[bytes, ParallelShape, int], RankMaker]
"""(settings, shape, rank)."""


def maker_factory(name: str) -> MakerFactory:
    module, _, attribute = name.partition(":")
    return cast(MakerFactory, getattr(importlib.import_module(module), attribute))
