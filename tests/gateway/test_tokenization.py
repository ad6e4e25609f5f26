"""Single tokens as text and bytes, and long texts off the event loop."""

from __future__ import annotations

import threading

import pytest
from antiphon_gateway.logprobs import finite
from antiphon_gateway.tokenization import INLINE_CHARACTERS, TextWorkers, TokenCodec, TokenizerInvalid
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.fake_worker import byte_tokenizer

CODEC = TokenCodec(byte_tokenizer().to_str().encode())


@given(st.text(max_size=50))
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(text: str) -> None:
    ids = CODEC.encode(text, add_special_tokens=False)
    assert b"".join(CODEC.token(token_id).data for token_id in ids) == text.encode()


def test_a_special_token_is_its_own_text() -> None:
    (token_id,) = CODEC.encode("<|im_start|>", add_special_tokens=False)
    assert CODEC.token(token_id).text == "<|im_start|>"


def test_part_of_a_character_has_bytes_and_a_replacement_character() -> None:
    first, second = CODEC.encode("\u00e9", add_special_tokens=False)
    assert CODEC.token(first).data + CODEC.token(second).data == "\u00e9".encode()
    assert CODEC.token(first).text == "\ufffd"


def test_an_id_beyond_the_vocabulary_is_empty() -> None:
    assert CODEC.token(10**6).data == b""


def test_sentencepiece_style_tokens() -> None:
    vocabulary = {"\u2581hello": 0, "<0xC3>": 1, "a": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    codec = TokenCodec(tokenizer.to_str().encode())
    assert codec.token(0).text == " hello"
    assert codec.token(1).data == b"\xc3"


def test_a_tokenizer_that_is_none_is_said() -> None:
    with pytest.raises(TokenizerInvalid, match=r"tokenizer\.json"):
        TokenCodec(b"{}")


async def test_long_texts_are_encoded_in_a_thread_and_short_ones_are_not() -> None:
    workers = TextWorkers()
    try:
        assert await workers.run(threading.get_ident, characters=INLINE_CHARACTERS) == threading.get_ident()
        assert await workers.run(threading.get_ident, characters=INLINE_CHARACTERS + 1) != threading.get_ident()
    finally:
        workers.close()


@pytest.mark.parametrize(
    ("logprob", "shown"), [(float("-inf"), -9999.0), (float("nan"), -9999.0), (-1.5, -1.5), (1e-6, 0.0)]
)
def test_log_probabilities_are_numbers(logprob: float, shown: float) -> None:
    assert finite(logprob) == shown
