"""Tiny random models of every supported shape, and a plain driver of an executor, for the torch engine's tests."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from antiphon_engine.executor import Executor, SampledToken, SampleSpec, SequenceStep
from antiphon_engine.interface import ModelInfo, Sampling
from antiphon_engine.torch_engine.memory_estimate import kv_shape
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

TINY_HEAD_DIM = 32

_COMMON: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": TINY_HEAD_DIM,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_DENSE: dict[str, Any] = {**_COMMON, "hidden_size": 84, "intermediate_size": 150}
"""No multiples of a vector register."""

_MOE: dict[str, Any] = {"num_experts_per_tok": 2}

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_DENSE, tie_word_embeddings=True),
    "llama3-rope": LlamaConfig(
        **_DENSE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": Qwen2Config(**_DENSE),
    "qwen3": Qwen3Config(**_DENSE),
    "mistral": MistralConfig(**_DENSE, sliding_window=None),
    "mistral-window": MistralConfig(**_DENSE, sliding_window=24),
    "mixtral": MixtralConfig(**_COMMON, **_MOE, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**_COMMON, **_MOE, num_experts=4, moe_intermediate_size=96, norm_topk_prob=True),
}

GREEDY = Sampling(temperature=0.0)

MIXTURES = frozenset({"mixtral", "qwen3_moe"})
"""Shapes that the compiled decoder leaves to `transformers`."""


def tiny_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model, always the same one for a name. Biases and norms are random too, so that none can be ignored."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype)


def info_for(model: PreTrainedModel, dtype: torch.dtype, block_tokens: int) -> ModelInfo:
    shape = kv_shape(model.config, block_tokens)
    return ModelInfo(
        model="tiny",
        revision="0",
        architecture=model.config.model_type,
        kv_format="test",
        block_tokens=block_tokens,
        kv_block_bytes=shape.block_bytes(dtype),
        max_context_tokens=model.config.max_position_embeddings,
        vocab_size=model.config.vocab_size,
        eos_token_ids=(2,),
        tokenizer_json=b"{}",
        tokenizer_config_json="{}",
        chat_template="",
        bos_token="",
        eos_token="",
        layers=shape.layers,
        kv_heads=shape.kv_heads,
    )


class GreedySampler:
    """The best logit; keeps the last logits it saw, for tests that compare them."""

    def __init__(self) -> None:
        self.logits = torch.empty(0)

    def sample(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[SampledToken]:
        assert logits.shape[0] == len(specs)
        self.logits = logits.clone()
        return [SampledToken(int(token), None) for token in logits.argmax(-1)]


@dataclass
class Running:
    """One request, driven by hand."""

    prompt: list[int]
    blocks: list[int]
    max_tokens: int
    chunk: int = 1 << 30
    done: int = 0
    output: list[int] = field(default_factory=list)
    sampling: Sampling = GREEDY

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.max_tokens

    def next_step(self, name: str) -> SequenceStep:
        known = [*self.prompt, *self.output]
        end = min(len(known), self.done + self.chunk)
        last = end == len(known)
        spec = SampleSpec(self.sampling, len(self.output), self.prompt, self.output, frozenset())
        return SequenceStep(name, known[self.done : end], self.done, self.blocks, spec if last else None)


def drive(executor: Executor, requests: Sequence[Running]) -> list[list[int]]:
    """Run all requests to their end, every step with all that are not finished."""
    while active := [request for request in requests if not request.finished]:
        step = [request.next_step(f"r{index}") for index, request in enumerate(active)]
        for request, part, token in zip(active, step, executor.execute(step), strict=True):
            request.done += len(part.tokens)
            assert (token is None) == (part.sample is None)
            if token is not None:
                request.output.append(token.token_id)
    return [request.output for request in requests]


def prompts_for(count: int, vocab: int = 200) -> list[list[int]]:
    """Random prompts of very different lengths."""
    generator = torch.Generator().manual_seed(3)
    lengths = [5, 37, 70, 1, 16, 33, 64, 2][:count]
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def requests_for(
    prompts: Sequence[list[int]], block_tokens: int, max_tokens: int, chunks: Sequence[int]
) -> list[Running]:
    """Requests with scattered, disjoint blocks; prompt i is computed in chunks of chunks[i % len(chunks)]."""
    needs = [-(-(len(prompt) + max_tokens) // block_tokens) for prompt in prompts]
    shuffled = torch.randperm(sum(needs), generator=torch.Generator().manual_seed(5)).tolist()
    return [
        Running(prompt, [shuffled.pop() for _ in range(need)], max_tokens, chunks[index % len(chunks)])
        for index, (prompt, need) in enumerate(zip(prompts, needs, strict=True))
    ]


def reference_tokens(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens from `generate`, never stopped early."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def pool_content(executor: Executor) -> torch.Tensor:
    """A copy of the whole pool, [block, kv_head, layer, 2, token, dim], read through its address as a peer would."""
    kv, info = executor.kv, executor.info
    raw = ctypes.string_at(kv.address, kv.length_bytes)
    per_token = kv.block_bytes // (info.kv_heads * info.layers * 2 * info.block_tokens)
    dtype = torch.float32 if per_token == 4 * TINY_HEAD_DIM else torch.bfloat16
    shape = (kv.num_blocks, info.kv_heads, info.layers, 2, info.block_tokens, TINY_HEAD_DIM)
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)
