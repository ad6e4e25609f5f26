"""Which tensor of a GGUF file is which tensor of a Hugging Face checkpoint, and how it lies there.

Two things differ but for names. All experts of a layer are one tensor, the first dimension counting them. And where
llama.cpp's architecture is `llama`, rows of q and k lie in another order: the two halves of a head's rotary pairs are
interleaved (convert_hf_to_gguf.py, `LlamaModel.permute`).

`layout` names every tensor that a model of this configuration has, with its shape, so that a file that lacks one, or
has one that nothing here would read, is refused before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from antiphon_engine.torch_engine.errors import DamagedCheckpoint, UnsupportedModel
from antiphon_engine.torch_engine.gguf_model.file import GgufFile
from antiphon_engine.torch_engine.gguf_model.rope import FACTORS

_ROTATED = ("attn_q", "attn_k")
_MIXTURE_NAMES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "mixtral": ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
"""By model type: the block that has the experts, and their matrices."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a checkpoint's tensor lies in the file."""

    tensor: str
    shape: tuple[int, ...]
    """Of the checkpoint's tensor."""
    expert: int = 0
    experts: int = 0
    """So many lie in the file's tensor; 0: it is the checkpoint's tensor."""
    interleaved_heads: int = 0
    """So many heads' rotary halves are interleaved; 0: rows lie as in a checkpoint."""

    @property
    def shape_in_file(self) -> tuple[int, ...]:
        return (self.experts, *self.shape) if self.experts else self.shape


def layout(config: Mapping[str, Any]) -> dict[str, Stored]:
    """By the checkpoint's names. `config`: the content of a config.json."""
    return dict(_all(config))


def check_tensors(file: GgufFile, config: Mapping[str, Any]) -> None:
    """Raises DamagedCheckpoint for a missing tensor or a wrong shape, UnsupportedModel for one too many."""
    wanted = {stored.tensor: stored.shape_in_file for stored in layout(config).values()}
    missing = sorted(wanted.keys() - file.tensors.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DamagedCheckpoint(f"{file.path} lacks the tensor {missing[0]}{more}: get another conversion of the model")
    for name, shape in wanted.items():
        if file.tensors[name].shape != shape:
            raise DamagedCheckpoint(
                f"{file.path} has a wrong shape for the tensor {name} ({file.tensors[name].shape}, not {shape}): "
                "get another conversion of the model"
            )
    unknown = sorted(file.tensors.keys() - wanted.keys() - {FACTORS})
    if unknown:
        raise UnsupportedModel(
            f"{file.path} has the tensor {unknown[0]}, which no {config['architectures'][0]} here has: this kind of "
            "model is not supported"
        )


def _all(config: Mapping[str, Any]) -> Iterator[tuple[str, Stored]]:
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    yield "model.embed_tokens.weight", Stored("token_embd.weight", (vocab, hidden))
    yield "model.norm.weight", Stored("output_norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", Stored("output.weight", (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        for name, stored in _layer(config, f"blk.{layer}"):
            yield f"model.layers.{layer}.{name}", stored


def _layer(config: Mapping[str, Any], block: str) -> Iterator[tuple[str, Stored]]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    kind = config["model_type"]
    yield "input_layernorm.weight", Stored(f"{block}.attn_norm.weight", (hidden,))
    yield "post_attention_layernorm.weight", Stored(f"{block}.ffn_norm.weight", (hidden,))
    if kind in ("qwen3", "qwen3_moe"):
        yield "self_attn.q_norm.weight", Stored(f"{block}.attn_q_norm.weight", (head_dim,))
        yield "self_attn.k_norm.weight", Stored(f"{block}.attn_k_norm.weight", (head_dim,))
    queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
    biased = bool(config.get("attention_bias"))
    for short, stored_name, heads in (("q", "attn_q", queries), ("k", "attn_k", keys), ("v", "attn_v", keys)):
        interleaved = heads if stored_name in _ROTATED and kind in ("llama", "mistral", "mixtral") else 0
        rows, name = heads * head_dim, f"self_attn.{short}_proj"
        stored = f"{block}.{stored_name}"
        yield f"{name}.weight", Stored(f"{stored}.weight", (rows, hidden), interleaved_heads=interleaved)
        if biased or kind == "qwen2":
            yield f"{name}.bias", Stored(f"{stored}.bias", (rows,), interleaved_heads=interleaved)
    yield "self_attn.o_proj.weight", Stored(f"{block}.attn_output.weight", (hidden, queries * head_dim))
    if biased:
        yield "self_attn.o_proj.bias", Stored(f"{block}.attn_output.bias", (hidden,))
    yield from _experts(config, block) if kind in _MIXTURE_NAMES else _mlp(config, block)


def _mlp(config: Mapping[str, Any], block: str) -> Iterator[tuple[str, Stored]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for short, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        yield f"mlp.{short}_proj.weight", Stored(f"{block}.ffn_{short}.weight", shape)
        if config.get("mlp_bias"):
            yield f"mlp.{short}_proj.bias", Stored(f"{block}.ffn_{short}.bias", shape[:1])


def _experts(config: Mapping[str, Any], block: str) -> Iterator[tuple[str, Stored]]:
    own, names = _MIXTURE_NAMES[config["model_type"]]
    count = config.get("num_experts") or config["num_local_experts"]
    hidden, inner = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
    yield f"{own}.gate.weight", Stored(f"{block}.ffn_gate_inp.weight", (count, hidden))
    for short, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        for expert in range(count):
            name = f"{own}.experts.{expert}.{names[short]}.weight"
            yield name, Stored(f"{block}.ffn_{short}_exps.weight", shape, expert, count)
