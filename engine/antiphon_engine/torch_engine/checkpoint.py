"""A model from a Hugging Face folder or a GGUF file: checked first, then loaded, or refused in one sentence.

Nothing in it is trusted to be right, and nothing in it is run: weights come from safetensors and GGUF only, model code
only from transformers, and nothing is looked for on the network. A tensor that the model needs and its files lack
is an error, never a random number. Whether the model fits into memory is asked before it is loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from antiphon_engine.torch_engine.attention import unsupported_reason
from antiphon_engine.torch_engine.checkpoint_info import ARCHITECTURES, CheckpointInfo
from antiphon_engine.torch_engine.errors import (
    BadModelFolder,
    DamagedCheckpoint,
    NotEnoughMemory,
    TorchEngineError,
    UnsupportedModel,
)
from antiphon_engine.torch_engine.gguf_model.file import is_gguf
from antiphon_engine.torch_engine.gguf_model.inspection import inspect_gguf
from antiphon_engine.torch_engine.memory_estimate import estimate_bytes
from antiphon_engine.torch_engine.parallel.rank_model import load_whole_model
from antiphon_engine.torch_engine.system_memory import available_memory_bytes
from antiphon_engine.torch_engine.weights import content_revision, read_weight_files

logger = logging.getLogger("antiphon.engine.torch")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: PreTrainedModel
    """In eval mode, all parameters in the dtype asked for."""
    info: CheckpointInfo


def load_checkpoint(path: Path, dtype: torch.dtype, *, available_bytes: int | None = None) -> LoadedModel:
    """Inspect and load. Refuses if the weights need more than `available_bytes` (None: what the system says).

    Raises TorchEngineError.
    """
    info = inspect_checkpoint(path)
    available = available_memory_bytes() if available_bytes is None else available_bytes
    needed = estimate_bytes(info.config, dtype, 0, 1)
    return LoadedModel(load_weights(info, dtype, needed_bytes=needed, available_bytes=available), info)


def inspect_checkpoint(path: Path) -> CheckpointInfo:
    """Everything that can be known, and refused, without loading weights. Raises TorchEngineError."""
    return inspect_gguf(path) if is_gguf(path) else _inspect_folder(path)


def _inspect_folder(folder: Path) -> CheckpointInfo:
    if not folder.is_dir():
        raise BadModelFolder(
            f"{folder} is not a folder: name one that holds config.json and *.safetensors, or a GGUF file"
        )
    config_bytes = _content(folder, "config.json")
    raw_config = _json_object(folder / "config.json", config_bytes)
    config, architecture = _config(folder, raw_config)
    files = read_weight_files(folder)
    tokenizer_json = _content(folder, "tokenizer.json")
    tokenizer = _tokenizer(folder, tokenizer_json)
    tokenizer_config = _optional_json(folder, "tokenizer_config.json")
    bos_token = _token_text(tokenizer_config.get("bos_token"))
    eos_token = _token_text(tokenizer_config.get("eos_token"))
    heads = int(config.num_attention_heads)
    return CheckpointInfo(
        path=folder,
        config=config,
        architecture=architecture,
        revision=content_revision(config_bytes, files),
        layers=int(config.num_hidden_layers),
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        max_context_tokens=int(config.max_position_embeddings),
        vocab_size=int(config.vocab_size),
        eos_token_ids=_eos_token_ids(folder, raw_config, tokenizer, eos_token),
        tokenizer_json=tokenizer_json,
        tokenizer_config_json=json.dumps(tokenizer_config, ensure_ascii=False),
        chat_template=_chat_template(folder, tokenizer_config),
        bos_token=bos_token,
        eos_token=eos_token,
    )


def load_weights(
    info: CheckpointInfo, dtype: torch.dtype, *, needed_bytes: int, available_bytes: int | None
) -> PreTrainedModel:
    """The model in eval mode, unless `needed_bytes` in all are more than `available_bytes` (None: not known)."""
    if available_bytes is not None and needed_bytes > available_bytes:
        raise NotEnoughMemory(
            f"{info.path} needs about {needed_bytes / 1e9:.1f} GB of memory in {dtype_name(dtype)} with its KV pool, "
            f"and {available_bytes / 1e9:.1f} GB are available: free memory, or choose a smaller model, dtype or pool"
        )
    if is_gguf(info.path):
        return load_whole_model(info.path, info.config, dtype)
    return _load_folder(info, dtype)


def _load_folder(info: CheckpointInfo, dtype: torch.dtype) -> PreTrainedModel:
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    model_class: type[PreTrainedModel] = getattr(transformers, info.architecture)
    try:
        model, report = model_class.from_pretrained(
            info.path,
            config=info.config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            # Reported below by name instead of raised without one.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except TorchEngineError:
        raise
    except Exception as error:
        # Whatever the library trips over here, the folder's weights do not make the model that its config describes.
        raise DamagedCheckpoint(
            f"{info.path} cannot be loaded ({_first_line(error)}): get the model's files again"
        ) from error
    _refuse_incomplete(info.path, report)
    return model.eval()


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, `float32`."""
    return str(dtype).removeprefix("torch.")


def _refuse_incomplete(folder: Path, report: Mapping[str, Any]) -> None:
    for kind, problem in (
        ("missing_keys", "lacks the tensor"),
        ("mismatched_keys", "has a wrong shape for the tensor"),
        ("error_msgs", "cannot be loaded:"),
    ):
        found = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in report.get(kind) or ())
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise DamagedCheckpoint(f"{folder} {problem} {found[0]}{more}: get the model's weights again")
    unexpected = sorted(report.get("unexpected_keys") or ())
    if unexpected:
        logger.warning("model folder has tensors that the model does not use count=%d first=%s", *_some(unexpected))


def _some(names: list[str]) -> tuple[int, str]:
    return len(names), names[0]


# ------------------------------------------------------------------ config.json


def _config(folder: Path, raw: Mapping[str, Any]) -> tuple[PreTrainedConfig, str]:
    architectures = raw.get("architectures") or ()
    architecture = str(architectures[0]) if architectures else "none"
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{folder} has the architecture {architecture}, which is not supported: "
            f"use one of {', '.join(ARCHITECTURES)}"
        )
    if raw.get("quantization_config"):
        method = _quantisation_method(raw["quantization_config"])
        raise UnsupportedModel(
            f"{folder} is quantised ({method}), which is not supported: use the model's bf16 or fp32 weights"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # The library's config classes check values in many ways and with many types.
        raise BadModelFolder(
            f"{folder / 'config.json'} does not describe a model ({_first_line(error)}): get the file again"
        ) from error
    expected: type[PreTrainedConfig] = getattr(transformers, architecture).config_class
    if type(config) is not expected:
        raise BadModelFolder(
            f"{folder / 'config.json'} names {architecture} with model_type {raw.get('model_type')!r}: correct the file"
        )
    if reason := unsupported_reason(config):
        raise UnsupportedModel(f"{folder} cannot be served: {reason}")
    return config, architecture


def _quantisation_method(section: object) -> str:
    return str(section.get("quant_method", "unknown")) if isinstance(section, Mapping) else "unknown"


# ------------------------------------------------------------------ tokenizer and special tokens


def _tokenizer(folder: Path, content: bytes) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises plain Exception
        raise BadModelFolder(
            f"{folder / 'tokenizer.json'} cannot be read ({_first_line(error)}): get the file again"
        ) from error


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str:
    """chat_template.jinja goes before tokenizer_config.json, as in transformers; of several the one named default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, str):
        return template
    named = {entry["name"]: entry["template"] for entry in template or ()}
    return str(named.get("default", ""))


def _token_text(entry: object) -> str:
    """A special token stands as its text or as an object with a `content`."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def _eos_token_ids(
    folder: Path, config: Mapping[str, Any], tokenizer: tokenizers.Tokenizer, eos_token: str
) -> tuple[int, ...]:
    """Ids that generation_config.json and config.json name, in that order; else the tokenizer's eos token's."""
    ids: list[int] = []
    for source in (_optional_json(folder, "generation_config.json"), config):
        entry = source.get("eos_token_id")
        ids += [entry] if isinstance(entry, int) else list(entry or ())
    if not ids and eos_token and (token_id := tokenizer.token_to_id(eos_token)) is not None:
        ids.append(token_id)
    return tuple(dict.fromkeys(ids))


# ------------------------------------------------------------------ files


def _content(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError as error:
        raise BadModelFolder(f"{folder} has no {name}: get the model's complete folder") from error


def _json_object(path: Path, content: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise BadModelFolder(f"{path} is not JSON ({error}): get the file again") from error
    if not isinstance(value, dict):
        raise BadModelFolder(f"{path} is not a JSON object: get the file again")
    return value


def _optional_json(folder: Path, name: str) -> Mapping[str, Any]:
    path = folder / name
    return _json_object(path, path.read_bytes()) if path.is_file() else {}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
