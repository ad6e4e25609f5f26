"""How much memory a model and its pool need, said before anything is loaded.

Weights are counted from the model's own definition, built without storage. With kernels the weights stand twice while
they are packed (once as loaded, once packed), so the estimate counts them twice; the pool counts whole.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from antiphon_engine.torch_engine.kv_cache import KvShape

RUNTIME_BYTES = 400 * 1024 * 1024
"""Interpreter, libraries and one step's activations and logits."""

_WEIGHT_COPIES = 2


def kv_shape(config: Any, block_tokens: int) -> KvShape:
    """The pool's block shape for a `transformers` configuration."""
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KvShape(
        layers=int(config.num_hidden_layers),
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        block_tokens=block_tokens,
    )


def weights_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of all parameters (shared ones once) in `dtype`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(int(parameter.numel()) for parameter in model.parameters())
    return count * dtype.itemsize


def estimate_bytes(config: Any, dtype: torch.dtype, num_blocks: int, block_tokens: int) -> int:
    """The most memory that loading and serving need with a pool of `num_blocks`."""
    pool = kv_shape(config, block_tokens).block_bytes(dtype) * num_blocks
    return weights_bytes(config, dtype) * _WEIGHT_COPIES + pool + RUNTIME_BYTES


def blocks_for_memory(config: Any, dtype: torch.dtype, block_tokens: int, memory_bytes: int) -> int:
    """How many blocks fit beside the weights into `memory_bytes`; 0 when not even the weights do."""
    left = memory_bytes - estimate_bytes(config, dtype, 0, block_tokens)
    return max(0, left // kv_shape(config, block_tokens).block_bytes(dtype))
