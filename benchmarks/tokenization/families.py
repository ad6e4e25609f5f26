"""Tokenizers that are measured: the demo model's, and two of other families trained on the pages at hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.support.models import demo_model

SPECIALS = ("<|im_start|>", "<|im_end|>")
VOCABULARY = 8000
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_WORDS = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How newer byte-level tokenizers (Llama 3's, Qwen's) cut words."""


class Family:
    def __init__(self, name: str, tokenizer: Tokenizer, template: str) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.template = template

    @property
    def json(self) -> bytes:
        return self.tokenizer.to_str().encode()

    def copy(self) -> Tokenizer:
        return copy.deepcopy(self.tokenizer)


def families(text: str) -> Iterator[Family]:
    """`text`: what the trained ones are trained on."""
    folder = demo_model()
    yield Family("demo", Tokenizer.from_file(str(folder / "tokenizer.json")), _template(folder))
    yield Family("split-bpe", _split_bpe(text), CHATML)
    yield Family("unigram", _unigram(text), CHATML)


def _template(folder: Path) -> str:
    template = folder / "chat_template.jinja"
    if template.exists():
        return template.read_text()
    found: str = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    return found


def _split_bpe(text: str) -> Tokenizer:
    """As Llama 3's and Qwen's are: normalised, cut by an expression, merges of bytes."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    return _trained(tokenizer, trainer, text)


def _unigram(text: str) -> Tokenizer:
    """As Llama 2's and T5's cut words (Metaspace), with a Unigram model: its texts cannot be cut."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    return _trained(tokenizer, trainer, text)


def _trained(tokenizer: Tokenizer, trainer: trainers.Trainer, text: str) -> Tokenizer:
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIALS])
    return tokenizer
