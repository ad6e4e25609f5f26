"""Detokenisation, a token at a time."""

from __future__ import annotations

import pytest
from antiphon_engine.timed_tokenizer import byte_tokenizer_json
from antiphon_worker.detokenize import Detokenizer, special_token_ids
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BYTES = Tokenizer.from_buffer(byte_tokenizer_json())
"""Every byte is a token."""


def sentence_piece() -> Tokenizer:
    """Words with a marked space, and byte tokens for what is in no word."""
    vocabulary = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "!": 3, "▁": 4}
    vocabulary |= {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, special_token_ids(tokenizer), skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(st.text(max_size=40))
def test_joined_pieces_are_the_text_and_no_piece_is_half_a_character(text):
    ids = BYTES.encode(text, add_special_tokens=False).ids
    got = pieces(BYTES, ids)
    assert "".join(got) == text
    if "�" not in text:
        assert not any("�" in piece for piece in got)


@given(st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=40), st.booleans())
def test_joined_pieces_equal_decoding_all_at_once_whatever_the_ids(ids, skip):
    assert "".join(pieces(BYTES, ids, skip=skip)) == BYTES.decode(ids, skip_special_tokens=skip)


def test_a_character_comes_with_its_last_token():
    ids = BYTES.encode("a€b", add_special_tokens=False).ids
    assert pieces(BYTES, ids) == ["a", "", "", "€", "b", ""]


def test_spaces_of_sentence_piece_tokens_stay():
    tokenizer = sentence_piece()
    ids = [1, 2, 3, 2]
    assert pieces(tokenizer, ids) == ["Hello", " world", "!", " world", ""]
    assert tokenizer.decode(ids) == "Hello world! world"


@given(st.lists(st.sampled_from(["▁Hello", "▁world", "!", "€", "ü", "😀"]), max_size=12))
def test_byte_tokens_between_words(words):
    tokenizer = sentence_piece()
    ids: list[int] = []
    for word in words:
        known = tokenizer.token_to_id(word)
        ids += [known] if known is not None else [5 + byte for byte in word.encode()]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip):
    special = next(iter(special_token_ids(BYTES)))
    ids = [*BYTES.encode("a", add_special_tokens=False).ids, special, *BYTES.encode("b", add_special_tokens=False).ids]
    assert "".join(pieces(BYTES, ids, skip=skip)) == BYTES.decode(ids, skip_special_tokens=skip)


def test_kept_special_tokens_have_text_and_the_others_have_none():
    tokenizer = Tokenizer.from_str(BYTES.to_str())
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    kept = [tokenizer.token_to_id("<tool_call>"), tokenizer.token_to_id("</tool_call>")]
    detokenizer = Detokenizer(tokenizer, special_token_ids(tokenizer), skip_special_tokens=True, kept_special_ids=kept)
    other = next(iter(special_token_ids(BYTES)))
    letters = BYTES.encode("é", add_special_tokens=False).ids
    got = [detokenizer.push(token_id) for token_id in [kept[0], other, *letters, other, kept[1]]]
    assert got == ["<tool_call>", "", "", "é", "", "</tool_call>"]


def test_endless_garbage_is_not_held_back_for_ever():
    detokenizer = Detokenizer(BYTES, frozenset(), skip_special_tokens=True)
    half = BYTES.encode("€", add_special_tokens=False).ids[0]
    assert any(detokenizer.push(half) for _ in range(200))
