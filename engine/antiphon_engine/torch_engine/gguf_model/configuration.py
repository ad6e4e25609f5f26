"""What config.json would say of the model in a GGUF file, from the file's metadata and the names of its tensors.

llama.cpp has fewer architectures than there are names of models: its `llama` is Llama, and Mistral and Mixtral too,
told from each other by a sliding window and by experts. A Mistral without a window computes what a Llama does, and is
served as one. What metadata cannot express here is refused, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from antiphon_engine.torch_engine.errors import DamagedCheckpoint, UnsupportedModel
from antiphon_engine.torch_engine.gguf_model.file import GgufFile
from antiphon_engine.torch_engine.gguf_model.rope import rope_parameters

ARCHITECTURES: Mapping[str, str] = {
    "llama": "Llama, Mistral, Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3moe": "Qwen3-MoE",
}
"""As `general.architecture` names them, and what they are."""

_TOKEN_KEYS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def config_json(file: GgufFile) -> bytes:
    """For those who read config.json. Raises UnsupportedModel, DamagedCheckpoint."""
    return json.dumps(read_config(file)).encode()


def read_config(file: GgufFile) -> dict[str, Any]:
    """The content of a config.json. Raises UnsupportedModel, DamagedCheckpoint."""
    kind = file.text("general.architecture")
    if kind not in ARCHITECTURES:
        known = ", ".join(f"{name} ({families})" for name, families in ARCHITECTURES.items())
        raise UnsupportedModel(f"{file.path} has the architecture {kind}, which is not supported: use one of {known}")
    heads = file.integer(f"{kind}.attention.head_count")
    hidden = file.integer(f"{kind}.embedding_length")
    if heads < 1 or hidden < 1:
        raise DamagedCheckpoint(f"{file.path} says that it has {heads} heads over {hidden}: get the file again")
    head_dim = _head_dim(file, kind, hidden // heads)
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": file.integer(f"{kind}.feed_forward_length"),
        "num_hidden_layers": file.integer(f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer(f"{kind}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.integer(f"{kind}.context_length"),
        "rms_norm_eps": file.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(file, kind, head_dim),
        "attention_dropout": 0.0,
        # The converter leaves the head out where it is the embedding.
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": _vocab_size(file),
        **{name: _token_id(file, key) for name, key in _TOKEN_KEYS.items()},
    }
    return {**config, **_family(file, kind)}


def _family(file: GgufFile, kind: str) -> dict[str, Any]:
    window = file.integer(f"{kind}.attention.sliding_window", 0)
    if f"{kind}.attention.sliding_window_pattern" in file.metadata or (window and kind != "llama"):
        raise UnsupportedModel(f"{file.path} has a sliding window in some of its layers only, which is not supported")
    if kind == "qwen2":
        return _named("Qwen2ForCausalLM", "qwen2")
    biases = {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    if kind == "qwen3":
        return {**_named("Qwen3ForCausalLM", "qwen3"), **biases}
    experts = file.integer(f"{kind}.expert_count", 0)
    if kind == "qwen3moe":
        return {
            **_named("Qwen3MoeForCausalLM", "qwen3_moe"),
            **biases,
            "num_experts": experts,
            "num_experts_per_tok": file.integer("qwen3moe.expert_used_count"),
            "moe_intermediate_size": file.integer("qwen3moe.expert_feed_forward_length"),
            "norm_topk_prob": True,  # llama.cpp does so whatever the file says
        }
    if experts:
        return {
            **_named("MixtralForCausalLM", "mixtral"),
            "num_local_experts": experts,
            "num_experts_per_tok": file.integer("llama.expert_used_count"),
            "sliding_window": window or None,
        }
    if window:
        return {**_named("MistralForCausalLM", "mistral"), "sliding_window": window}
    return {**_named("LlamaForCausalLM", "llama"), **biases, "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}


def _named(architecture: str, model_type: str) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type}


def _head_dim(file: GgufFile, kind: str, usual: int) -> int:
    rotary = file.integer(f"{kind}.rope.dimension_count", usual)
    keys = file.integer(f"{kind}.attention.key_length", rotary)
    values = file.integer(f"{kind}.attention.value_length", keys)
    if keys != values or keys < 2 or keys % 2:
        raise UnsupportedModel(f"{file.path} has heads of {keys} for keys and {values} for values: not supported")
    return keys


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise DamagedCheckpoint(f"{file.path} lacks the tensor token_embd.weight: get the file again")
    return embedding.shape[0]


def _token_id(file: GgufFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return file.integer(key) if key in file.metadata else None
