"""What a model's files say of it, read without loading weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

ARCHITECTURES: tuple[str, ...] = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    path: Path
    """A folder, or a GGUF file."""
    config: PreTrainedConfig
    architecture: str
    revision: str
    """Digest of config and weights (`weights.content_revision`)."""
    layers: int
    kv_heads: int
    head_dim: int
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_json: bytes
    tokenizer_config_json: str
    chat_template: str
    """Empty if there is none."""
    bos_token: str
    eos_token: str
