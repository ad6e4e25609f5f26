"""`TorchExecutor`: one step on a `transformers` model with a paged KV pool.

It owns the model, the pool's memory and the sampler; `BlockEngine` owns which block belongs to whom. A step packs the
tokens of all its sequences into one forward pass, whatever mix of prompt chunks and decodes they are, and computes
logits only for the rows that sample, and for those that score their prompt.

Two ways lead through the model. `NativeDecoder` runs the whole stack in one compiled call, for the dense shapes it
knows. Everything else runs the model's own definition with our attention function (`attention.py`), whose inner part is
compiled where a compiler is there. Which one is taken is decided once, when the executor is made, and logged.

A step either succeeds whole or raises: inputs are checked before anything is computed (`InvalidStep`), and KV that a
failed step has written lies in blocks that only this step's sequences own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from antiphon_engine.executor import Executor, SampledToken, SequenceStep, row_specs, step_results
from antiphon_engine.interface import KvMemory, ModelInfo
from antiphon_engine.torch_engine.attention import ATTENTION_NAME, AttentionKernel, PagedStep, unsupported_reason
from antiphon_engine.torch_engine.kernels.native import (
    NativeAttention,
    NativeDecoder,
    attention_obstacle,
    decoder_obstacle,
    typed_library,
)
from antiphon_engine.torch_engine.kv_cache import KvCache
from antiphon_engine.torch_engine.memory_estimate import kv_shape
from antiphon_engine.torch_engine.scores import TokenSampler, tokens_of
from antiphon_engine.torch_engine.step_batch import StepBatch, build_batch

logger = logging.getLogger("antiphon.engine.torch")


class TorchExecutor(Executor):
    """Takes the model over: with compiled kernels its layers' weights are packed and the originals dropped."""

    def __init__(
        self,
        model: PreTrainedModel,
        info: ModelInfo,
        *,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        sampler: TokenSampler,
        threads: int = 0,
        kernels: bool = True,
        cache_dir: Path | None = None,
    ) -> None:
        """Raises ValueError for a model that cannot run here.

        `threads`: compute threads; 0 keeps torch's choice. `kernels`: False never uses compiled code.
        `cache_dir`: where compiled code is kept; None: the default one.
        """
        reason = unsupported_reason(model.config)
        if reason is not None:
            raise ValueError(reason)
        if threads > 0:
            torch.set_num_threads(threads)
        with contextlib.suppress(RuntimeError):  # can be set once a process, before the first parallel work
            torch.set_num_interop_threads(1)
        shape = kv_shape(model.config, block_tokens)
        self._cache = KvCache(shape, num_blocks, dtype)
        if info.kv_block_bytes != self._cache.memory.block_bytes:
            raise ValueError(
                f"the model card says {info.kv_block_bytes} bytes a block, the pool has "
                f"{self._cache.memory.block_bytes}: block_tokens or dtype differ"
            )
        self._info = info
        self._sampler = sampler
        self._model: PreTrainedModel | None = model.eval()
        model.set_attn_implementation(ATTENTION_NAME)
        self._attention_kernel: AttentionKernel | None = None
        self._decoder: NativeDecoder | None = None
        if kernels:
            self._use_kernels(model, cache_dir)

    def _use_kernels(self, model: PreTrainedModel, cache_dir: Path | None) -> None:
        library = typed_library(cache_dir / "kernels" if cache_dir else None)
        if library is None:
            return
        obstacle = attention_obstacle(library, self._cache)
        if obstacle is None:
            self._attention_kernel = NativeAttention(library, self._cache, int(model.config.num_attention_heads))
            obstacle = decoder_obstacle(model.config, model, self._cache)
        if obstacle is None:
            self._decoder = NativeDecoder(library, model, self._cache, torch.get_num_threads())
            self._model = None
        logger.info(
            "compute path chosen decoder=%s attention=%s why=%r",
            "compiled" if self._decoder else "torch",
            "compiled" if self._attention_kernel else "torch",
            obstacle or "all of the model has kernels",
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def kv(self) -> KvMemory:
        return self._cache.memory

    @torch.inference_mode()
    def execute(self, step: Sequence[SequenceStep]) -> list[SampledToken | None]:
        if not step:
            return []
        batch = build_batch(
            step,
            block_tokens=self._cache.shape.block_tokens,
            num_blocks=self._cache.num_blocks,
            vocab_size=self._info.vocab_size,
            max_context_tokens=self._info.max_context_tokens,
        )
        logits = self._logits(batch)
        specs = [sequence.sample for sequence in step if sequence.sample is not None]
        if len(specs) < len(batch.sample_rows):
            return step_results(step, tokens_of(self._sampler, logits, row_specs(step)))
        sampled = iter(self._sampler.sample(logits, specs) if specs else ())
        return [None if sequence.sample is None else next(sampled) for sequence in step]

    def _logits(self, batch: StepBatch) -> torch.Tensor:
        """Compute the step; logits [wanted rows, vocabulary] in fp32."""
        if self._decoder is not None:
            return self._decoder.logits(batch)
        model = self._model
        if model is None:
            raise RuntimeError("the executor is closed")
        hidden = model.model(
            torch.from_numpy(batch.tokens).long()[None],
            position_ids=torch.from_numpy(batch.positions).long()[None],
            use_cache=False,
            kv=PagedStep(batch, self._cache, self._attention_kernel),
        ).last_hidden_state[0]
        logits: torch.Tensor = model.lm_head(hidden[torch.from_numpy(batch.sample_rows).long()])
        return logits.float()

    def close(self) -> None:
        """Let go of the model. The pool's memory stays until the last transfer that names it is over. Idempotent."""
        self._model = None
        self._attention_kernel = None
        self._decoder = None
