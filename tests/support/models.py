"""Real model folders for tests: tiny random ones of each supported shape, and the demo model."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from antiphon_engine.torch_engine.demo import default_cache_dir, prepare_demo
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support.chat_templates import QWEN_25

Shape = Literal["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe"]

SHAPES: tuple[Shape, ...] = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe")

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1, 2."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TEXT = (
    "The quick brown fox jumps over the lazy dog.",
    "Prefill computes the prompt, decode writes the answer, one token after the other.",
    "In the beginning was the word, and the word was a token; the token was in the vocabulary.",
)


def write_tiny_model(folder: Path, shape: Shape = "llama", seed: int = 0) -> Path:
    """Write config.json, generation_config.json, model.safetensors (bf16), tokenizer.json and tokenizer_config.json.

    A few hundred thousand random parameters, always the same ones for a shape and seed; a byte-level tokenizer that
    knows every string; EOS is <|im_end|>. Returns `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _byte_level_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(shape, vocab_size))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)  # so that none can be left out unseen
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": SPECIAL_TOKENS[1],
                "eos_token": SPECIAL_TOKENS[2],
                "pad_token": SPECIAL_TOKENS[2],
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=2,
        )
    )
    return folder


@functools.cache
def demo_model() -> Path:
    """The demo model's folder, from the user's cache; downloaded the first time."""
    return prepare_demo(default_cache_dir(), lambda line: print(line, file=sys.stderr))


def demo_model_with_tools(folder: Path) -> Path:
    """The demo model's files, and a chat template with a place for tools: Qwen's, whose calls are Hermes'."""
    folder.mkdir(parents=True)
    for file in demo_model().iterdir():
        (folder / file.name).symlink_to(file)
    configuration = folder / "tokenizer_config.json"
    changed = {**json.loads(configuration.read_text()), "chat_template": QWEN_25}
    configuration.unlink()
    configuration.write_text(json.dumps(changed))
    return folder


def _byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def _config(shape: Shape, vocab_size: int) -> PreTrainedConfig:
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    if shape == "llama":
        return LlamaConfig(**common, tie_word_embeddings=True)
    if shape == "qwen2":
        return Qwen2Config(**common)
    if shape == "qwen3":
        return Qwen3Config(**common)
    if shape == "mistral":
        return MistralConfig(**common, sliding_window=None)
    if shape == "mixtral":
        return MixtralConfig(**common, num_local_experts=4, num_experts_per_tok=2)
    return Qwen3MoeConfig(**common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True)
