"""What is measured: models, executors of one rank and of several, and an executor that notes the times of its steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec
import torch
from antiphon_engine import Executor, KvMemory, ModelInfo, SampledToken, SequenceStep
from antiphon_engine.executor import RankTimes
from antiphon_engine.gang import GangExecutor, GangSettings, RayCluster
from antiphon_engine.gang.torch_ranks import MAKER, look_at_model
from antiphon_engine.parallel import ParallelShape
from antiphon_engine.torch_engine.factory import TorchSettings
from antiphon_engine.torch_engine.parallel.groups import join_groups
from antiphon_engine.torch_engine.parallel.runner import RankRunner, RankSettings
from antiphon_engine.torch_engine.step_batch import build_batch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.models import write_tiny_model

BLOCK_TOKENS = 16
POOL_BLOCKS = 400
MODELS = {
    "58M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16, "vocab_size": 16384},
    "2M": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1024},
}
"""Llamas with random weights. In the small one a step takes so little that all which is beside it shows."""


def write_model(folder: Path, name: str) -> Path:
    write_tiny_model(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        **MODELS[name],
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


class InProcess(Executor):
    """One rank of the same code as the gang's, in this process: what several ranks are compared with.

    Not `TorchExecutor`, which has the whole stack of layers compiled, as ranks have not.
    """

    def __init__(self, folder: Path) -> None:
        shape = ParallelShape()
        groups = join_groups(shape, 0, "", 0, 1.0)
        settings = RankSettings(folder, shape, 0, "float32", POOL_BLOCKS, BLOCK_TOKENS, threads=1)
        self._runner = RankRunner(settings, groups)
        self._busy_s = 0.0

    @property
    def info(self) -> ModelInfo:
        return self._runner.info

    @property
    def kv(self) -> KvMemory:
        return self._runner.kv

    @property
    def rank_times(self) -> RankTimes:
        return RankTimes(self._busy_s, 0.0)

    def execute(self, step: Sequence[SequenceStep]) -> list[SampledToken | None]:
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)  # of this thread, the engine's
        info = self.info
        batch = build_batch(
            step,
            block_tokens=info.block_tokens,
            num_blocks=POOL_BLOCKS,
            vocab_size=info.vocab_size,
            max_context_tokens=info.max_context_tokens,
        )
        begun_s = time.perf_counter()
        tokens = self._runner.step(batch, [one.sample for one in step if one.sample is not None])
        self._busy_s += time.perf_counter() - begun_s
        sampled = iter(tokens or ())
        return [next(sampled) if one.sample is not None else None for one in step]

    def close(self) -> None:
        self._runner.close()


def start_gang(folder: Path, shape: ParallelShape, cluster: RayCluster) -> GangExecutor:
    """One thread a rank."""
    settings = TorchSettings(
        model=str(folder),
        dtype="float32",
        kv_blocks=POOL_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        max_context_tokens=2048,
        threads=shape.ranks,
    )
    model = look_at_model(settings, shape, print)
    return GangExecutor.start(GangSettings(shape, MAKER, model.packed), cluster, print, threading.Event())


class Timed(msgspec.Struct):
    """One step, in seconds of this process's clock and in durations that its ranks said."""

    tokens: int
    sequences: int
    begin_s: float
    """`begin` was called."""
    begun_s: float = 0.0
    """It returned: packed, and written to all ranks' sockets. In process: computed."""
    ended_s: float = 0.0
    busy_s: float = 0.0
    exchange_s: float = 0.0


class Noting(Executor):
    """Another executor, and the times of its steps."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.steps: list[Timed] = []
        self._known = self._times()

    @property
    def info(self) -> ModelInfo:
        return self._executor.info

    @property
    def kv(self) -> KvMemory:
        return self._executor.kv

    @property
    def depth(self) -> int:
        return self._executor.depth

    def execute(self, step: Sequence[SequenceStep]) -> list[SampledToken | None]:
        return self.begin(step).result()

    def begin(self, step: Sequence[SequenceStep]) -> Future[list[SampledToken | None]]:
        timed = Timed(sum(len(one.tokens) for one in step), len(step), time.perf_counter())
        future = self._executor.begin(step)
        timed.begun_s = time.perf_counter()
        self.steps.append(timed)

        def ended(_: Future[list[SampledToken | None]]) -> None:
            timed.ended_s = time.perf_counter()
            now = self._times()
            timed.busy_s = now.busy_s - self._known.busy_s
            timed.exchange_s = now.exchange_s - self._known.exchange_s
            self._known = now

        future.add_done_callback(ended)
        return future

    def _times(self) -> RankTimes:
        return self._executor.rank_times or RankTimes(0.0, 0.0)

    def close(self) -> None:
        self._executor.close()
