"""Writes a Hugging Face folder as the GGUF file that llama.cpp's converter would make of it.

Names of tensors and keys are those of the `gguf` package; quantised types that it can only read are random blocks.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoConfig

Type = gguf.GGMLQuantizationType
Array = NDArray[Any]

_ARCHITECTURES = {
    **{name: gguf.MODEL_ARCH.LLAMA for name in ("llama", "mistral", "mixtral")},
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)\.weight")
_MATRICES = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6


def write_gguf_of(
    folder: Path,
    target: Path,
    kind: Type = Type.F32,
    *,
    pre: str = "gpt-2",
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
    without: str = "",
) -> Path:
    """Matrices in `kind`, vectors in F32. `edit` may add keys; the tensor `without` is left out. Returns `target`."""
    config = AutoConfig.from_pretrained(folder)
    architecture = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture])
    _add_sizes(writer, config)
    _add_vocabulary(writer, folder, config.vocab_size, pre)
    if edit is not None:
        edit(writer)
    for name, values in _tensors(folder, config, architecture):
        if name == without:
            continue
        if values.ndim == 1:
            writer.add_tensor(name, values)
        elif kind is Type.BF16:
            raw = torch.from_numpy(values).bfloat16().view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=kind)
        else:
            writer.add_tensor(name, quantised(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def write_vocabulary_of(
    folder: Path, target: Path, *, pre: str = "gpt-2", edit: Callable[[gguf.GGUFWriter], None] | None = None
) -> Path:
    """A file with the tokenizer of tokenizer.json and tokenizer_config.json in `folder`, and no model to speak of."""
    writer = gguf.GGUFWriter(target, "llama")
    _add_vocabulary(writer, folder, 0, pre)
    if edit is not None:
        edit(writer)
    writer.add_tensor("nothing.weight", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def quantised(values: Array, kind: Type) -> Array:
    """Blocks of `kind`. K-quants, which the package only reads: any blocks, with small scales, made from the values."""
    if kind not in (Type.Q4_K, Type.Q5_K, Type.Q6_K):
        return np.asarray(gguf.quantize(values, kind))
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (*values.shape[:-1], values.shape[-1] // block, block_bytes)
    blocks = np.random.default_rng(values.size).integers(0, 256, shape, np.uint8)
    scales = np.full((*shape[:-1], 2 if kind is not Type.Q6_K else 1), 0.001, np.float16).view(np.uint8)
    if kind is Type.Q6_K:
        blocks[..., -2:] = scales  # the last two bytes of a block are its scale
    else:
        blocks[..., :4] = scales  # the first four are its scale and its least value's
    return blocks.reshape(*values.shape[:-1], -1)


def _add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.model_type in ("mistral", "mixtral") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_vocabulary(writer: gguf.GGUFWriter, folder: Path, size: int, pre: str) -> None:
    """With names that nobody says for embeddings behind the last token, up to `size`."""
    content = json.loads((folder / "tokenizer.json").read_text())
    told = json.loads((folder / "tokenizer_config.json").read_text())
    ids: dict[str, int] = content["model"]["vocab"]
    added = {token["content"]: _CONTROL if token["special"] else _USER for token in content["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [_kind(token, added) for token in tokens]
    padding = range(len(tokens), size)
    if content["model"].get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        # The order in which pieces were learned is that of their ids.
        writer.add_token_scores([-float(index) for index in range(max(len(tokens), size))])
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_token_list([*tokens, *(f"[PAD{index}]" for index in padding)])
    writer.add_token_types([*kinds, *(5 for _ in padding)])
    for name, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("unk", writer.add_unk_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        if token := told.get(f"{name}_token"):
            add(ids[token])
    post = content.get("post_processor") or {}
    writer.add_add_bos_token(post.get("type") == "TemplateProcessing")
    if template := told.get("chat_template"):
        writer.add_chat_template(template)


def _kind(token: str, added: Mapping[str, int]) -> int:
    if token == "<unk>":
        return _UNKNOWN
    return _BYTE if re.fullmatch(r"<0x[0-9A-F]{2}>", token) else added.get(token, _NORMAL)


def _tensors(folder: Path, config: Any, architecture: gguf.MODEL_ARCH) -> Iterator[tuple[str, Array]]:
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    experts: dict[str, dict[int, Array]] = defaultdict(dict)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        if expert := _EXPERT.fullmatch(name):
            experts[f"blk.{expert[1]}.ffn_{_MATRICES[expert[3]]}_exps.weight"][int(expert[2])] = values
            continue
        stem, _, leaf = name.rpartition(".")
        if architecture is gguf.MODEL_ARCH.LLAMA and stem.endswith(("q_proj", "k_proj")):
            own = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            values = _interleaved(values, own)
        yield f"{names.get_name(stem)}.{leaf}", values
    for stacked, own_values in experts.items():
        yield stacked, np.stack([own_values[index] for index in range(len(own_values))])
    if config.rope_parameters["rope_type"] == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config)


def _interleaved(values: Array, heads: int) -> Array:
    """Rows a0 a1 ... b0 b1 ... of each head as a0 b0 a1 b1 ..."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _llama3_factors(config: Any) -> Array:
    rope = config.rope_parameters
    original, low, high = (
        rope["original_max_position_embeddings"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
    )
    factors = []
    for index in range(config.head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * index / config.head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            share = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(factors, np.float32)
