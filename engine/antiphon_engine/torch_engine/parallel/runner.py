"""`RankRunner`: one rank's part of every step, on its own model, pool and threads.

All ranks of a replica get the same packed steps in the same order, with the same block numbers. The first stage turns
token ids into activations, each stage hands them to the next, and the first rank of the last stage has the logits and
chooses the tokens; no other rank knows them. A step that fails on one rank leaves the others waiting until their
deadline: whoever runs the ranks has to end them all.

On one rank alone it is `TorchExecutor` that is faster: it has the whole stack of layers compiled. Here layers run by
`transformers`' own code, with attention compiled where it can be.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from antiphon_kvtransfer.plane import KvPart

from antiphon_engine.executor import RowSpec, SampledToken
from antiphon_engine.interface import KvMemory, ModelInfo
from antiphon_engine.parallel import ParallelShape, check_shape
from antiphon_engine.torch_engine.attention import ATTENTION_NAME, AttentionKernel, PagedStep
from antiphon_engine.torch_engine.checkpoint import inspect_checkpoint
from antiphon_engine.torch_engine.errors import NotEnoughMemory
from antiphon_engine.torch_engine.factory import TorchSettings, model_info, torch_dtype
from antiphon_engine.torch_engine.kernels.native import NativeAttention, attention_obstacle, typed_library
from antiphon_engine.torch_engine.kv_cache import KvCache
from antiphon_engine.torch_engine.parallel.collectives import gather_logits
from antiphon_engine.torch_engine.parallel.groups import Groups
from antiphon_engine.torch_engine.parallel.rank_model import load_rank_model, rank_estimate_bytes, rank_kv_shape
from antiphon_engine.torch_engine.parallel.skeleton import Skeleton, model_dims
from antiphon_engine.torch_engine.sampler import Sampler
from antiphon_engine.torch_engine.scores import tokens_of
from antiphon_engine.torch_engine.step_batch import StepBatch
from antiphon_engine.torch_engine.system_memory import available_memory_bytes

__all__ = ["RankRunner", "RankSettings", "model_dims", "rank_estimate_bytes"]

logger = logging.getLogger("antiphon.engine.torch")


@dataclass(frozen=True, slots=True)
class RankSettings:
    folder: Path
    """With config.json, tokenizer and safetensors weights, or a GGUF file; the same content for every rank."""
    shape: ParallelShape
    rank: int
    dtype: str = "bfloat16"
    """bfloat16 or float32."""
    num_blocks: int = 0
    """Of the pool: the same number on every rank."""
    block_tokens: int = 64
    threads: int = 0
    """Compute threads of this rank; 0 keeps torch's choice."""
    cache_dir: Path | None = None
    """Where compiled kernels are kept; None: the default one."""
    kernels: bool = True
    """False never uses compiled code."""


class RankRunner:
    """Used from one thread, but for `info`, `kv` and `part`."""

    def __init__(self, settings: RankSettings, groups: Groups) -> None:
        """Load the rank's weights and map its pool. Raises TorchEngineError, ShapeRefused, GroupBroken."""
        dtype = torch_dtype(settings.dtype)
        checkpoint = inspect_checkpoint(settings.folder)
        check_shape(settings.shape, model_dims(checkpoint.config))
        self._info = model_info(
            checkpoint,
            TorchSettings(model=str(settings.folder), dtype=settings.dtype, block_tokens=settings.block_tokens),
            dtype,
        )
        _refuse_too_big(checkpoint.config, settings, dtype)
        if settings.threads > 0:
            torch.set_num_threads(settings.threads)
        with contextlib.suppress(RuntimeError):  # can be set once a process, before the first parallel work
            torch.set_num_interop_threads(1)
        self._groups = groups
        skeleton = load_rank_model(settings.folder, checkpoint.config, dtype, settings.shape, settings.rank, groups)
        skeleton.model.set_attn_implementation(ATTENTION_NAME)
        self._skeleton: Skeleton | None = skeleton
        self._dtype = dtype
        self.part: KvPart = skeleton.part
        """Of the model's KV: what this rank's pool holds of each block."""
        self._cache = KvCache(
            rank_kv_shape(checkpoint.config, skeleton, settings.block_tokens), settings.num_blocks, dtype
        )
        self._samples = settings.rank == settings.shape.sampling_rank
        self._sampler = Sampler(self._info.vocab_size)
        self._kernel = self._attention_kernel(settings, skeleton) if settings.kernels else None

    def _attention_kernel(self, settings: RankSettings, skeleton: Skeleton) -> AttentionKernel | None:
        library = typed_library(settings.cache_dir / "kernels" if settings.cache_dir else None)
        obstacle = "no compiled kernels" if library is None else attention_obstacle(library, self._cache)
        logger.info(
            "rank loaded rank=%d shape=%r layers=%d-%d heads=%d-%d attention=%s why=%r",
            *(settings.rank, str(settings.shape)),
            *(self.part.layer_begin, self.part.layer_end, self.part.head_begin, self.part.head_end),
            *("torch" if obstacle else "compiled", obstacle or "it has kernels"),
        )
        if library is None or obstacle is not None:
            return None
        return NativeAttention(library, self._cache, skeleton.dims.query_heads // settings.shape.tensor)

    @property
    def info(self) -> ModelInfo:
        """Of the whole model. Ranks whose `info.revision` differs have different weights."""
        return self._info

    @property
    def kv(self) -> KvMemory:
        """The rank's own part of each block."""
        return self._cache.memory

    @property
    def exchanged_s(self) -> float:
        """Of all steps so far: time in sums with the stage's other ranks, and in passing activations on."""
        return self._groups.exchanged_s

    @torch.inference_mode()
    def step(self, batch: StepBatch, specs: Sequence[RowSpec]) -> list[SampledToken] | None:
        """Compute this rank's part of a step: one token for each of `batch.sample_rows`, as its spec says.

        None on all ranks but the sampling one, which alone looks at `specs`. Raises GroupBroken.
        """
        skeleton = self._skeleton
        if skeleton is None:
            raise RuntimeError("the rank is closed")
        model = skeleton.model
        hidden: torch.Tensor = model.model(
            inputs_embeds=self._enter(skeleton, batch)[None],
            position_ids=torch.from_numpy(batch.positions).long()[None],
            use_cache=False,
            kv=PagedStep(batch, self._cache, self._kernel),
        ).last_hidden_state[0]
        if not skeleton.last:
            self._groups.send_on(hidden.contiguous())
            return None
        if not len(batch.sample_rows):
            return [] if self._samples else None
        local = model.lm_head(hidden[torch.from_numpy(batch.sample_rows).long()])
        logits = gather_logits(local, self._info.vocab_size, skeleton.shape.tensor, self._groups)
        return None if logits is None else tokens_of(self._sampler, logits.float(), specs)

    def _enter(self, skeleton: Skeleton, batch: StepBatch) -> torch.Tensor:
        """The step's activations as they come into this stage, [rows, hidden]."""
        model = skeleton.model
        if not skeleton.first:
            return self._groups.receive(batch.rows, int(model.config.hidden_size), self._dtype)
        embedded: torch.Tensor = model.model.embed_tokens(torch.from_numpy(batch.tokens).long())
        return embedded

    def close(self) -> None:
        """Let go of the model. The pool's memory stays until the last transfer that names it is over. Idempotent."""
        self._skeleton = None
        self._kernel = None


def _refuse_too_big(config: object, settings: RankSettings, dtype: torch.dtype) -> None:
    available = available_memory_bytes()
    needed = rank_estimate_bytes(
        config, dtype, settings.shape, settings.rank, settings.num_blocks, settings.block_tokens
    )
    if available is not None and needed > available:
        raise NotEnoughMemory(
            f"rank {settings.rank} of {settings.shape} of {settings.folder} needs about {needed / 1e9:.1f} GB of "
            f"memory in {settings.dtype} with its KV pool, and {available / 1e9:.1f} GB are available: free memory, "
            "or choose more ranks, or a smaller dtype or pool"
        )
