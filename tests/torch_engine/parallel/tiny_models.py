"""Small random models with enough heads and experts to be cut four ways, and what one rank computes with them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from antiphon_engine.executor import SampledToken, SampleSpec
from antiphon_engine.torch_engine.checkpoint import load_checkpoint
from antiphon_engine.torch_engine.executor import TorchExecutor
from antiphon_engine.torch_engine.factory import TorchSettings, model_info, torch_dtype
from antiphon_engine.torch_engine.noise import Noise
from antiphon_engine.torch_engine.sampler import Sampler
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support.models import write_tiny_model
from tests.support.reference import assert_same
from tests.support.torch_engine import Running, drive, prompts_for, requests_for

BLOCK_TOKENS = 16

VOCAB = 391
"""A prime behind the tokenizer's 384: no number of ranks divides it."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 150,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": VOCAB - 1,
}
"""150 and 391 come out even on 4 ranks for neither; the last token id lies on the last rank."""

_TWO_KV_HEADS: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama-tied": LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "llama-biased": LlamaConfig(**_COMMON, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**_TWO_KV_HEADS),
    "qwen2-window": Qwen2Config(**_COMMON, use_sliding_window=True, sliding_window=24, max_window_layers=2),
    "qwen3": Qwen3Config(**_COMMON),
    "qwen3-two-kv-heads": Qwen3Config(**_TWO_KV_HEADS, tie_word_embeddings=True),
    "mistral-window": MistralConfig(**_COMMON, sliding_window=24),
    "mixtral": MixtralConfig(**{**_COMMON, "intermediate_size": 152}, num_local_experts=8, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **_TWO_KV_HEADS,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
}


def write_model(folder: Path, config: PreTrainedConfig) -> Path:
    """A folder with fp32 weights, always the same. Biases and norms are random too, so that none can be left out."""
    write_tiny_model(folder)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True)
class Expected:
    """What one rank answers to some requests."""

    outputs: list[list[int]]
    gaps: list[list[float]]
    """How far the best two logits are apart, at each output position."""

    def assert_same(self, requests: Sequence[Running]) -> int:
        """Equal up to the first near tie of each request. Returns how many tokens were compared."""
        pairs = zip(requests, self.outputs, self.gaps, strict=True)
        return sum(assert_same(request.output, (output, gaps)) for request, output, gaps in pairs)

    @property
    def smallest_gap(self) -> float:
        return min(gap for gaps in self.gaps for gap in gaps)


class _GapSampler:
    """The product's sampler, which also notes how far the best two scores are apart, with penalties and noise."""

    def __init__(self, vocab_size: int) -> None:
        self._sampler = Sampler(vocab_size)
        self.gaps: dict[tuple[tuple[int, ...], int], float] = {}
        """By prompt and output position."""

    def sample(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[SampledToken]:
        for row, spec in zip(logits.float().numpy(), specs, strict=True):
            second, best = np.sort(self._scores(row, spec))[-2:]
            self.gaps[tuple(spec.prompt), spec.position] = float(best - second)
        return self._sampler.sample(logits, specs)

    def _scores(self, row: np.ndarray[tuple[int], np.dtype[np.float32]], spec: SampleSpec) -> Any:
        sampling, scores = spec.sampling, self._sampler._adjusted(row, spec)
        if not sampling.temperature:
            return scores
        noise = Noise(sampling.seed, sampling.choice, spec.position).uniform_of(np.arange(len(row)))
        return scores.astype(np.float64) / sampling.temperature - np.log(-np.log1p(-noise))


def one_rank(folder: Path, dtype: str = "float32") -> tuple[TorchExecutor, _GapSampler]:
    """The executor of a replica of one rank, on `transformers`' own code."""
    loaded = load_checkpoint(folder, torch_dtype(dtype))
    settings = TorchSettings(model=str(folder), dtype=dtype, block_tokens=BLOCK_TOKENS)
    sampler = _GapSampler(VOCAB)
    executor = TorchExecutor(
        loaded.model,
        model_info(loaded.info, settings, torch_dtype(dtype)),
        num_blocks=64,
        block_tokens=BLOCK_TOKENS,
        dtype=torch_dtype(dtype),
        sampler=sampler,
        threads=2,
        kernels=False,
    )
    return executor, sampler


def mixed_requests(max_tokens: int = 12) -> list[Running]:
    """Four prompts over scattered blocks, prefilled whole, in chunks and token by token: steps of all kinds at once."""
    return requests_for(prompts_for(4), BLOCK_TOKENS, max_tokens, chunks=[1 << 30, 10, 32, 1])


@functools.cache
def expected(folder: Path) -> Expected:
    executor, sampler = one_rank(folder)
    requests = mixed_requests()
    outputs = drive(executor, requests)
    gaps = [
        [sampler.gaps[tuple(request.prompt), place] for place in range(len(request.output))] for request in requests
    ]
    return Expected(outputs, gaps)
