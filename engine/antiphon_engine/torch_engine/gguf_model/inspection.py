"""A GGUF file checked and described, as `checkpoint` does for a folder: all that can be refused without its weights."""

from __future__ import annotations

import json
from pathlib import Path

import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedConfig

from antiphon_engine.torch_engine.attention import unsupported_reason
from antiphon_engine.torch_engine.checkpoint_info import CheckpointInfo
from antiphon_engine.torch_engine.errors import DamagedCheckpoint, UnsupportedModel
from antiphon_engine.torch_engine.gguf_model.configuration import read_config
from antiphon_engine.torch_engine.gguf_model.file import GgufFile, read_gguf
from antiphon_engine.torch_engine.gguf_model.layout import check_tensors
from antiphon_engine.torch_engine.gguf_model.tokenizer import build_tokenizer, special_token

_ENDS = ("eos", "eot", "eom")
_END_TOKENS = ("<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>")
"""End an answer wherever they are special tokens, as in llama.cpp: converters name one id, models have several."""


def inspect_gguf(path: Path) -> CheckpointInfo:
    """Raises TorchEngineError."""
    file = read_gguf(path)
    content = read_config(file)
    check_tensors(file, content)
    architecture = content["architectures"][0]
    config_class: type[PreTrainedConfig] = getattr(transformers, architecture).config_class
    try:
        config = config_class.from_dict(content)
    except Exception as error:
        # The library's config classes check values in many ways and with many types.
        raise DamagedCheckpoint(f"{path} does not describe a model ({error!r}): get the file again") from error
    if reason := unsupported_reason(config):
        raise UnsupportedModel(f"{path} cannot be served: {reason}")
    tokenizer = build_tokenizer(file)
    known = tokenizer.get_vocab_size()
    if known > content["vocab_size"]:
        raise DamagedCheckpoint(
            f"{path} has {known} tokens and embeddings of {content['vocab_size']}: get another conversion of the model"
        )
    bos, eos = special_token(file, "bos"), special_token(file, "eos")
    template = file.text("tokenizer.chat_template", "")
    return CheckpointInfo(
        path=path,
        config=config,
        architecture=architecture,
        revision=file.revision(),
        layers=content["num_hidden_layers"],
        kv_heads=content["num_key_value_heads"],
        head_dim=content["head_dim"],
        max_context_tokens=content["max_position_embeddings"],
        vocab_size=content["vocab_size"],
        eos_token_ids=_eos_token_ids(file, tokenizer),
        tokenizer_json=tokenizer.to_str().encode(),
        tokenizer_config_json=_tokenizer_config(file, template),
        chat_template=template,
        bos_token=bos,
        eos_token=eos,
    )


def _tokenizer_config(file: GgufFile, template: str) -> str:
    """What tokenizer_config.json would say."""
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokens = {f"{short}_token": special_token(file, name) for short, name in names.items()}
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: token for key, token in tokens.items() if token},
        "clean_up_tokenization_spaces": False,
        **({"chat_template": template} if template else {}),
    }
    return json.dumps(told, ensure_ascii=False)


def _eos_token_ids(file: GgufFile, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Those that the file names, then those whose text is known to end an answer."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in _ENDS]
    named = [file.integer(key) for key in keys if key in file.metadata]
    special = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return tuple(dict.fromkeys([*named, *(special[token] for token in _END_TOKENS if token in special)]))
