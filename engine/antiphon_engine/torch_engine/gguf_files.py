"""Between GGUF files and Hugging Face folders, for Llama-shaped models with a byte-level BPE vocabulary.

`convert_gguf` writes a folder (config.json, generation_config.json, model.safetensors, tokenizer.json,
tokenizer_config.json) from a GGUF file; `write_gguf` writes such a folder back as a bf16 GGUF.

Everything is written from what the file itself says, not through a loader's guesses. Four things need care:

* *Row order of Q and K.* llama.cpp keeps the two halves of each head's rotary pairs interleaved; Hugging Face keeps
  one half after the other. Rows are put back in order, head by head.
* *Digits.* The vocabulary's pre-tokenizer "smollm" splits every digit off before anything else; a plain GPT-2
  pre-tokenizer gives other ids for numbers.
* *Names.* `tokenizer_class` is PreTrainedTokenizerFast, which every version of transformers knows.
* *rope_theta* stands at the top level of config.json, where every reader looks.

Weights are dequantised in fp32 and rounded once to bf16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from antiphon_engine.torch_engine.errors import DamagedCheckpoint, UnsupportedModel

_PRE_TOKENIZER = "smollm"
_CONTROL_TOKEN = 3
"""GGUF's token type of special tokens; 1 is a normal token."""

_HF_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAMES: Mapping[str, str] = {name: gguf_name for gguf_name, name in _HF_NAMES.items()}


@dataclass(frozen=True, slots=True)
class _Metadata:
    """The GGUF's key-value part, read with an error that names what is missing."""

    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        if key not in self.values:
            raise DamagedCheckpoint(f"the GGUF file has no {key}: get it again")
        return self.values[key]


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the Hugging Face folder of a GGUF file into `folder`, which exists and is empty.

    Raises UnsupportedModel for another architecture or vocabulary, DamagedCheckpoint for an unreadable file.
    """
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise DamagedCheckpoint(f"{source} is not a whole GGUF file ({error}): get it again") from error
    metadata = _Metadata({key: field.contents() for key, field in reader.fields.items()})
    if (architecture := metadata.get("general.architecture")) != "llama":
        raise UnsupportedModel(f"{source} has the architecture {architecture}: only llama is converted")
    _write_json(folder / "config.json", _config(metadata))
    _write_json(folder / "generation_config.json", _generation_config(metadata))
    _write_tokenizer(folder, metadata)
    save_file(dict(_tensors(reader, metadata)), folder / "model.safetensors", metadata={"format": "pt"})


def write_gguf(folder: Path, target: Path) -> None:
    """Write a folder that `convert_gguf` made as a GGUF file with the same bf16 weights."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    _add_vocabulary(writer, folder, config)
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118  (not a mapping: it cannot be iterated)
            _add_tensor(writer, name, weights.get_tensor(name), config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ------------------------------------------------------------------ to Hugging Face


def _config(metadata: _Metadata) -> dict[str, Any]:
    heads = int(metadata.get("llama.attention.head_count"))
    hidden = int(metadata.get("llama.embedding_length"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": int(metadata.get("llama.feed_forward_length")),
        "num_hidden_layers": int(metadata.get("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get("llama.attention.head_count_kv")),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(metadata.get("llama.context_length")),
        # Stored as fp32: the shortest decimal that gives the same fp32 is the number that was meant (1e-05).
        "rms_norm_eps": float(str(np.float32(metadata.get("llama.attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(metadata.get("llama.rope.freq_base")),
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": int(metadata.get("llama.vocab_size")),
        "bos_token_id": int(metadata.get("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(metadata.get("tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(metadata.get("tokenizer.ggml.padding_token_id")),
        "torch_dtype": "bfloat16",
    }


def _generation_config(metadata: _Metadata) -> dict[str, Any]:
    return {
        "bos_token_id": int(metadata.get("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(metadata.get("tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(metadata.get("tokenizer.ggml.padding_token_id")),
    }


def _write_tokenizer(folder: Path, metadata: _Metadata) -> None:
    pre = metadata.get("tokenizer.ggml.pre")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or pre != _PRE_TOKENIZER:
        raise UnsupportedModel(f"the GGUF file has the pre-tokenizer {pre}: only {_PRE_TOKENIZER} is converted")
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens")
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type")
    merges: Sequence[str] = metadata.get("tokenizer.ggml.merges")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[int(metadata.get("tokenizer.ggml.bos_token_id"))],
            "eos_token": tokens[int(metadata.get("tokenizer.ggml.eos_token_id"))],
            "unk_token": tokens[int(metadata.get("tokenizer.ggml.unknown_token_id"))],
            "pad_token": tokens[int(metadata.get("tokenizer.ggml.padding_token_id"))],
            "model_max_length": int(metadata.get("llama.context_length")),
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": metadata.get("tokenizer.chat_template"),
        },
    )


def _tensors(reader: gguf.GGUFReader, metadata: _Metadata) -> Iterator[tuple[str, torch.Tensor]]:
    heads = int(metadata.get("llama.attention.head_count"))
    kv_heads = int(metadata.get("llama.attention.head_count_kv"))
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        stem = tensor.name.removesuffix(".weight")
        if stem == "token_embd":
            name = "model.embed_tokens"
        elif stem == "output_norm":
            name = "model.norm"
        else:
            kind, layer, part = stem.split(".")
            if kind != "blk" or part not in _HF_NAMES:
                raise UnsupportedModel(f"the GGUF file has a tensor {tensor.name}, which this conversion does not know")
            if part == "attn_q":
                weight = _separate_rotary_halves(weight, heads)
            elif part == "attn_k":
                weight = _separate_rotary_halves(weight, kv_heads)
            name = f"model.layers.{layer}.{_HF_NAMES[part]}"
        yield f"{name}.weight", torch.from_numpy(np.array(weight, dtype=np.float32)).to(torch.bfloat16).contiguous()


def _separate_rotary_halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """[heads * dim, in], rows of a head (a0 b0 a1 b1 ...) -> (a0 a1 ... b0 b1 ...)."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


# ------------------------------------------------------------------ to GGUF


def _add_vocabulary(writer: gguf.GGUFWriter, folder: Path, config: Mapping[str, Any]) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    special = {token["content"] for token in content["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL_TOKEN if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_unk_token_id(vocabulary[tokenizer_config["unk_token"]])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(tokenizer_config["chat_template"])


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> None:
    stem = name.removesuffix(".weight")
    if stem == "model.embed_tokens":
        target = "token_embd"
    elif stem == "model.norm":
        target = "output_norm"
    else:
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        target = f"blk.{layer}.{_GGUF_NAMES[part]}"
        if part == "self_attn.q_proj":
            tensor = _interleave_rotary_halves(tensor, config["num_attention_heads"])
        elif part == "self_attn.k_proj":
            tensor = _interleave_rotary_halves(tensor, config["num_key_value_heads"])
    if tensor.dim() == 1:
        # llama.cpp reads norms in fp32 only; a bf16 value is exact in it.
        writer.add_tensor(f"{target}.weight", tensor.float().numpy())
    else:
        raw = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(f"{target}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _interleave_rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `_separate_rotary_halves`."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
