"""Detokenisation of many scripts and signs, by tokenizers of the kinds that models come with."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import pytest
from antiphon_engine.interface import FinishReason, TokenLogprob
from antiphon_worker.detokenize import Detokenizer, special_token_ids
from antiphon_worker.stops import StopStrings
from antiphon_worker.text import OutputText
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.awkward_texts import AWKWARD

_TRAINED_ON = [AWKWARD[name] for name in ("ascii", "latin", "thai", "arabic", "emoji joined")] * 3
_METASPACE = (decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse())


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen: merges of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINED_ON, trainer)
    return tokenizer


def byte_fallback(strip: bool) -> Tokenizer:
    """Llama 2 and Mistral (`strip`: the space put before the text is taken away), Gemma: characters, and bytes for what
    is in no token."""
    spaces = pre_tokenizers.Metaspace(prepend_scheme="first" if strip else "never", split=False)
    learning = Tokenizer(models.BPE(unk_token="<unk>"))
    learning.pre_tokenizer = spaces
    trainer = trainers.BpeTrainer(vocab_size=160, special_tokens=["<unk>"], limit_alphabet=60, show_progress=False)
    learning.train_from_iterator(_TRAINED_ON, trainer)
    learnt = json.loads(learning.to_str())["model"]
    vocabulary = {**learnt["vocab"]}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    merges = [tuple(merge) for merge in learnt["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = spaces
    ends = [decoders.Strip(" ", 1, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence([*_METASPACE, *ends])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte fallback, stripped": functools.partial(byte_fallback, True),
    "byte fallback": functools.partial(byte_fallback, False),
}


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


def told(tokenizer: Tokenizer, ids: list[int], step: int = 1, stop: str = "") -> list[str]:
    """The pieces that a client gets where each step brings so many tokens."""
    text = OutputText(
        Detokenizer(tokenizer, special_token_ids(tokenizer), skip_special_tokens=True),
        StopStrings([stop] if stop else [], include_stop_text=False),
    )
    pieces = []
    for begin in range(0, len(ids), step):
        part = ids[begin : begin + step]
        finish = FinishReason.LENGTH if begin + step >= len(ids) else None
        delta = text.push(tuple(part), [TokenLogprob(token_id, 0.0) for token_id in part], finish)
        pieces.append(delta.text)
        if delta.finish is not None:
            break
    return pieces


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", AWKWARD)
def test_pieces_are_the_decoded_whole_however_many_tokens_come_at_once(kind: str, name: str) -> None:
    tokenizer, text = tokenizer_of(kind), AWKWARD[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text, "else this proves nothing"
    for step in (1, 2, 3, 7, len(ids)):
        pieces = told(tokenizer, ids, step)
        assert "".join(pieces) == text
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_is_cut_says_what_it_has_as_decoding_says_it(kind: str) -> None:
    """With byte fallback, decoding takes back a whole run of bytes when its last character is cut; what was told of it
    before stays."""
    tokenizer, text = tokenizer_of(kind), AWKWARD["emoji joined"] + AWKWARD["thai"]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for length in range(1, len(ids)):
        said, decoded = "".join(told(tokenizer, ids[:length])), tokenizer.decode(ids[:length])
        if said != decoded:
            assert kind.startswith("byte fallback")
            assert said.endswith("\ufffd")
            assert text.startswith(said.rstrip("\ufffd"))
            assert said.startswith(decoded.rstrip("\ufffd"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_that_begins_within_a_token_or_a_sign_never_leaks(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    text = AWKWARD["emoji joined"] + AWKWARD["thai"] + AWKWARD["ascii"]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for begin in range(0, len(text) - 3, 2):
        stop = text[begin : begin + 3]
        for step in (1, 4):
            assert "".join(told(tokenizer, ids, step, stop)) == text[: text.find(stop)]
