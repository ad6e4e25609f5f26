"""The torch engine as what a gang's ranks run, and what the driver has to know of the model before there are any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from antiphon_kvtransfer.plane import KvPart

from antiphon_engine.executor import RowSpec, SampledToken
from antiphon_engine.gang.environment import usable_cores
from antiphon_engine.gang.runner import Meeting
from antiphon_engine.interface import KvMemory, ModelInfo
from antiphon_engine.parallel import ParallelShape, check_shape, kv_part
from antiphon_engine.torch_engine.attention import unsupported_reason
from antiphon_engine.torch_engine.checkpoint import inspect_checkpoint
from antiphon_engine.torch_engine.checkpoint_info import CheckpointInfo
from antiphon_engine.torch_engine.demo import default_cache_dir, prepare_demo
from antiphon_engine.torch_engine.errors import BadSettings, UnsupportedModel
from antiphon_engine.torch_engine.factory import DEMO, TorchSettings, model_info, torch_dtype
from antiphon_engine.torch_engine.parallel.groups import Groups, join_groups
from antiphon_engine.torch_engine.parallel.runner import RankRunner, RankSettings, model_dims, rank_estimate_bytes
from antiphon_engine.torch_engine.step_batch import StepBatch
from antiphon_engine.torch_engine.system_memory import available_memory_bytes

MAKER = "antiphon_engine.gang.torch_ranks:TorchMaker"
STEP_S = 120.0
"""For what a rank waits for within a step. Longer than any step takes: the driver notices a lost rank at once."""
_POOL_SHARE = 0.25
_POOL_CONTEXTS = 16
"""As on one rank, where settings name no pool size: a share of the memory, and no more than so many contexts need."""


class TorchRankSettings(msgspec.Struct, frozen=True):
    folder: str
    """Or a GGUF file. The same path on every machine."""
    engine: TorchSettings


@dataclass(frozen=True, slots=True)
class TorchModel:
    """The driver's knowledge of a model that ranks are going to load."""

    packed: bytes
    """For `TorchMaker`."""
    info: ModelInfo


def look_at_model(settings: TorchSettings, shape: ParallelShape, progress: Callable[[str], None]) -> TorchModel:
    """Refuse what cannot be served, before a process is started. Raises TorchEngineError, ShapeRefused."""
    cache_dir = Path(settings.cache_dir) if settings.cache_dir else default_cache_dir()
    folder = prepare_demo(cache_dir, progress) if settings.model == DEMO else Path(settings.model).expanduser()
    if settings.block_tokens < 1 or settings.kv_blocks < 0 or settings.kv_memory_gb < 0:
        raise BadSettings("block_tokens has to be positive, and kv_blocks and kv_memory_gb not negative")
    checkpoint = inspect_checkpoint(folder)
    if (reason := unsupported_reason(checkpoint.config)) is not None:
        raise UnsupportedModel(reason)
    check_shape(shape, model_dims(checkpoint.config))
    info = model_info(checkpoint, settings, torch_dtype(settings.dtype))
    return TorchModel(msgspec.msgpack.encode(TorchRankSettings(str(folder.absolute()), settings)), info)


class TorchMaker:
    """In a rank's process."""

    def __init__(self, settings: bytes, shape: ParallelShape, rank: int) -> None:
        told = msgspec.msgpack.decode(settings, type=TorchRankSettings)
        self._settings = told.engine
        self._folder = Path(told.folder)
        self._shape = shape
        self._rank = rank
        self._checkpoint: CheckpointInfo = inspect_checkpoint(self._folder)
        self._info = model_info(self._checkpoint, told.engine, torch_dtype(told.engine.dtype))
        self._threads = 1

    def possible_blocks(self, ranks_here: int) -> int:
        """As settings say, else from this machine's memory, of which its other ranks take as much."""
        settings, info = self._settings, self._info
        self._threads = max(1, (settings.threads or usable_cores()) // ranks_here)
        if settings.kv_blocks:
            return settings.kv_blocks
        part = kv_part(self._shape, model_dims(self._checkpoint.config), self._rank)
        own_bytes = info.kv_block_bytes * part.layers * part.heads // (info.layers * info.kv_heads)
        if settings.kv_memory_gb:
            return int(settings.kv_memory_gb * 1e9) // own_bytes
        most = -(-info.max_context_tokens // info.block_tokens) * _POOL_CONTEXTS
        available = available_memory_bytes()
        if available is None:
            return most
        weights = rank_estimate_bytes(
            self._checkpoint.config, torch_dtype(settings.dtype), self._shape, self._rank, 0, settings.block_tokens
        )
        share = available // ranks_here
        return max(0, min(most, (share - weights) // own_bytes, int(share * _POOL_SHARE) // own_bytes))

    def make(self, num_blocks: int, meeting: Meeting) -> TorchRank:
        groups = join_groups(
            self._shape,
            self._rank,
            meeting.host,
            meeting.port,
            meeting.timeout_s,
            own_address=meeting.own_address,
            collective_timeout_s=STEP_S,
            listening=meeting.listening,
        )
        settings = self._settings
        runner = RankRunner(
            RankSettings(
                folder=self._folder,
                shape=self._shape,
                rank=self._rank,
                dtype=settings.dtype,
                num_blocks=num_blocks,
                block_tokens=settings.block_tokens,
                threads=self._threads,
                cache_dir=Path(settings.cache_dir) if settings.cache_dir else default_cache_dir(),
            ),
            groups,
        )
        return TorchRank(runner, groups, self._info)


class TorchRank:
    """A `RankRunner` whose card says what the worker was told: its name, and its longest context."""

    def __init__(self, runner: RankRunner, groups: Groups, info: ModelInfo) -> None:
        self._runner = runner
        self._groups = groups
        self._info = info

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def kv(self) -> KvMemory:
        return self._runner.kv

    @property
    def part(self) -> KvPart:
        return self._runner.part

    @property
    def exchanged_s(self) -> float:
        return self._runner.exchanged_s

    def step(self, batch: StepBatch, specs: Sequence[RowSpec]) -> list[SampledToken] | None:
        return self._runner.step(batch, specs)

    def close(self) -> None:
        self._runner.close()
        self._groups.close()
