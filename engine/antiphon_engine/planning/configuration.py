"""A model's config.json, as far as memory and shapes depend on it.

The families that the engine runs, and no other: what is not known cannot be counted. A number that a family's
published files always carry has to be there; the rest has the family's default, as `transformers` has it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from antiphon_engine.parallel import ModelDims


class ConfigRefused(ValueError):
    """It is no config.json that can be planned for. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class _Family:
    """What the configuration does not say because the model's code says it."""

    qkv_bias: bool = False
    """q, k and v have biases whatever the configuration says."""
    reads_attention_bias: bool = False
    """`attention_bias` gives q, k, v and o biases."""
    reads_mlp_bias: bool = False
    head_norms: bool = False
    """A norm over each head's q and k."""
    moe: bool = False
    kv_heads: int | None = None
    """Where the configuration has none; None: as many as query heads."""
    head_dim: int | None = None
    """Where the configuration has none; None: hidden size by query heads."""


_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": _Family(kv_heads=8),
    "MixtralForCausalLM": _Family(kv_heads=8, moe=True),
    "Qwen2ForCausalLM": _Family(qkv_bias=True),
    "Qwen3ForCausalLM": _Family(reads_attention_bias=True, head_norms=True, head_dim=128),
    "Qwen3MoeForCausalLM": _Family(reads_attention_bias=True, head_norms=True, moe=True, kv_heads=4),
}


class _File(Struct):
    """Keys of config.json; None: not there."""

    architectures: list[str] | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    num_local_experts: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    decoder_sparse_step: int | None = None
    mlp_only_layers: list[int] | None = None
    quantization_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a model, in the field's words."""

    architecture: str
    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    intermediate: int
    """Of a dense layer's MLP."""
    max_context_tokens: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    experts: int = 0
    """Of a layer that has some; 0: a dense model."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    dense_layers: frozenset[int] = frozenset()
    """Of a model with experts: layers that have none."""

    @property
    def dims(self) -> ModelDims:
        return ModelDims(self.layers, self.query_heads, self.kv_heads, self.experts)

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense_layers

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Of the whole model: keys and values of all KV heads in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


DEMO_CONFIG = b"""{
  "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
  "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
  "tie_word_embeddings": true, "vocab_size": 49152
}"""
"""Of the model that is called `demo` (SmolLM2-135M-Instruct), so that it need not be downloaded to be planned for."""


def read_config(content: bytes, name: str) -> ModelConfig:
    """The sizes in a config.json; `name` is how messages call it. Raises ConfigRefused."""
    try:
        file = msgspec.json.decode(content, type=_File)
    except msgspec.MsgspecError as error:
        raise ConfigRefused(f"{name} is no model's config.json ({error}): get the file again") from error
    architecture = file.architectures[0] if file.architectures else "none"
    family = _FAMILIES.get(architecture)
    if family is None:
        raise ConfigRefused(
            f"{name} has the architecture {architecture}, which no engine here runs: use one of {', '.join(_FAMILIES)}"
        )
    if file.quantization_config:
        method = file.quantization_config.get("quant_method", "unknown method")
        raise ConfigRefused(f"{name} is quantised ({method}), which no engine here runs: use the unquantised model")
    sizes = _Sizes(file, name)
    hidden, heads, layers = (sizes(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    head_dim = file.head_dim or family.head_dim or hidden // heads
    kv_heads = file.num_key_value_heads or family.kv_heads or heads
    if heads % kv_heads:
        raise ConfigRefused(f"{name} has {heads} query heads for {kv_heads} KV heads: get the file again")
    bias = family.reads_attention_bias and bool(file.attention_bias)
    config = ModelConfig(
        architecture=architecture,
        hidden=hidden,
        layers=layers,
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=sizes("vocab_size"),
        intermediate=sizes("intermediate_size"),
        max_context_tokens=sizes("max_position_embeddings"),
        tied_embeddings=bool(file.tie_word_embeddings),
        qkv_bias=family.qkv_bias or bias,
        output_bias=bias,
        mlp_bias=family.reads_mlp_bias and bool(file.mlp_bias),
        head_norms=family.head_norms,
    )
    return _with_experts(config, file, sizes) if family.moe else config


class _Sizes:
    """Reads a size that has to be there."""

    def __init__(self, file: _File, name: str) -> None:
        self._file = file
        self._name = name

    def __call__(self, *keys: str) -> int:
        for key in keys:
            found: int | None = getattr(self._file, key)
            if found is not None:
                if found < 1:
                    raise ConfigRefused(f"{self._name} says {key}: {found}: get the file again")
                return found
        raise ConfigRefused(f"{self._name} does not say {keys[0]}: get the file again")


def _with_experts(config: ModelConfig, file: _File, sizes: _Sizes) -> ModelConfig:
    mixtral = config.architecture == "MixtralForCausalLM"
    step = file.decoder_sparse_step or 1
    dense = () if mixtral else (i for i in range(config.layers) if i in (file.mlp_only_layers or ()) or (i + 1) % step)
    # Mixtral's experts are as wide as its MLP would be; its files have no key of their own for it.
    width = config.intermediate if mixtral else sizes("moe_intermediate_size")
    return dataclasses.replace(
        config,
        experts=sizes("num_local_experts", "num_experts"),
        experts_per_token=sizes("num_experts_per_tok"),
        expert_intermediate=width,
        dense_layers=frozenset(dense),
    )
