"""A chat's ids are those of the whole text, however much of it was known; what is kept is bounded, and one tenant's."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from antiphon_gateway.metrics import GatewayMetrics
from antiphon_gateway.tokenization import INLINE_CHARACTERS, TokenCodec
from antiphon_gateway.tokenization_cache import ENTRY_BYTES, EncodingCache, Owner, key_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.fake_worker import byte_tokenizer
from tests.support.models import demo_model

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|im_start|>system", "<|")
"""One begins as another does, and goes on; one begins all of them."""
CORPUS = (
    "The quick brown fox's caf\u00e9, the 12 foxes' 1234 caf\u00e9s.\n\n  The end of the fox \u4f60\u597d",
    "  def f(x):\n\treturn x",
)
WORDS = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def trained() -> Tokenizer:
    """As newer models have it: normalised, cut by an expression, a start token by template, other added tokens."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken("fox", normalized=True), AddedToken("<tool>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def of(tokenizer: Tokenizer) -> bytes:
    return tokenizer.to_str().encode()


TOKENIZERS = {
    "demo": (demo_model() / "tokenizer.json").read_bytes(),
    "bytes": of(byte_tokenizer()),
    "trained": of(trained()),
}
PLAIN = {name: TokenCodec(data) for name, data in TOKENIZERS.items()}
LARGE = {name: TokenCodec(data, EncodingCache(1 << 20)) for name, data in TOKENIZERS.items()}
OWNER = Owner(b"tokenizer and salt")
SMALL_BYTES = 12 * ENTRY_BYTES
SMALL = {name: TokenCodec(data, EncodingCache(SMALL_BYTES)) for name, data in TOKENIZERS.items()}

pieces = st.one_of(
    st.sampled_from(
        [
            *SPECIALS,
            "<tool>",
            "<s>",
            "<|endoftext|>",
            "<file_sep>",
            "fox",
            "system\n",
            " ",
            "\n",
            "  ",
            "\u0301",
            "\u200d",
        ]
    ),
    st.sampled_from(
        ["e\u0301", "\U0001f469\u200d\U0001f4bb", "'s", "12", "<|im_", "end|>", "\r\n", "The quick brown fox"]
    ),
    st.text(max_size=12),
)
texts = st.lists(pieces, max_size=14).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=80, deadline=None)
@given(text=texts)
def test_ids_are_those_of_the_whole_text(name: str, text: str) -> None:
    whole = PLAIN[name].encode(text, add_special_tokens=False)
    for codec in (LARGE[name], SMALL[name]):
        for _ in range(2):
            assert codec.begin_chat(text, b"").finish().tolist() == whole


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_are_those_of_the_whole_text_in_many_threads_that_push_out_each_others_pieces(name: str) -> None:
    cache = EncodingCache(SMALL_BYTES)
    codec = TokenCodec(TOKENIZERS[name], cache)
    chats = [f"<|im_start|>user\nthe {number % 7} foxes<|im_end|>\n{number % 40}" for number in range(400)]
    whole = [PLAIN[name].encode(chat, add_special_tokens=False) for chat in chats]
    with ThreadPoolExecutor(8) as threads:
        encoded = list(threads.map(lambda chat: codec.begin_chat(chat, b"").finish().tolist(), chats))
    assert encoded == whole
    assert 0 < cache.bytes <= SMALL_BYTES
    assert 0 < len(cache) < 40, "some was pushed out"


def test_turns_that_were_seen_are_not_encoded_again() -> None:
    cache = EncodingCache(1 << 20)
    codec = TokenCodec(TOKENIZERS["demo"], cache)
    first = f"<|im_start|>system\n{'Be brief. ' * 50}<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    codec.begin_chat(first, b"").finish()
    encoded = cache.encoded_characters
    asked = "user\nAnd now?"
    codec.begin_chat(f"{first}<|im_start|>{asked}<|im_end|>\n", b"").finish()
    assert cache.encoded_characters - encoded == len(asked)
    assert cache.found_characters > 500


def test_a_new_line_between_turns_is_not_looked_up_and_takes_no_room() -> None:
    cache = EncodingCache(1 << 20)
    codec = TokenCodec(TOKENIZERS["demo"], cache)
    chat = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>user\nAgain<|im_end|>\n"
    for _ in range(2):
        ids = codec.begin_chat(chat, b"").finish().tolist()
        assert ids == PLAIN["demo"].encode(chat, add_special_tokens=False)
    asked = len("user\nHello") + len("user\nAgain")
    assert len(cache) == 2
    assert (cache.encoded_characters, cache.found_characters) == (asked, asked)


def test_what_is_left_to_do_shrinks_with_what_is_known() -> None:
    codec = TokenCodec(TOKENIZERS["demo"], EncodingCache(1 << 20))
    chat = f"<|im_start|>system\n{'Be brief. ' * 1000}<|im_end|>\n"
    assert codec.begin_chat(chat, b"").work_characters > INLINE_CHARACTERS
    codec.begin_chat(chat, b"").finish()
    assert codec.begin_chat(chat, b"").work_characters < INLINE_CHARACTERS
    wide = codec.begin_chat("\u4f60" * 1000, b"").work_characters
    assert wide > INLINE_CHARACTERS, "a wide character is several bytes to encode"


def test_one_tenant_does_not_find_what_another_one_brought() -> None:
    cache = EncodingCache(1 << 20)
    codec = TokenCodec(TOKENIZERS["demo"], cache)
    chat = "<|im_start|>system\nA secret of the house"
    codec.begin_chat(chat, b"salt of one").finish()
    found = cache.found_characters
    codec.begin_chat(chat, b"salt of the other").finish()
    assert cache.found_characters == found
    codec.begin_chat(chat, b"salt of one").finish()
    assert cache.found_characters > found


def test_models_that_share_a_cache_do_not_share_ids() -> None:
    cache = EncodingCache(1 << 20)
    chat = "<|im_start|>user\nThe quick brown fox"
    codecs = {name: TokenCodec(data, cache) for name, data in TOKENIZERS.items()}
    for _ in range(2):
        for name, codec in codecs.items():
            assert codec.begin_chat(chat, b"").finish().tolist() == PLAIN[name].encode(chat, add_special_tokens=False)
    assert len(cache) == len(codecs)


def test_what_was_used_longest_ago_goes_first_and_a_text_for_a_large_part_of_the_cache_is_not_kept() -> None:
    cache = EncodingCache(10 * ENTRY_BYTES)
    ids = array("I", [1, 2])
    for text in ("a", "b", *(f"more {number}" for number in range(20))):
        cache.put(key_of(OWNER, text), ids)
        assert cache.get(key_of(OWNER, "a"), 1) == ids
    assert cache.get(key_of(OWNER, "b"), 1) is None
    kept = cache.bytes
    cache.put(key_of(OWNER, "large"), array("I", range(ENTRY_BYTES)))
    assert cache.bytes == kept


def test_ids_of_a_long_text_are_kept_in_pieces_and_come_back_whole() -> None:
    cache = EncodingCache(1 << 20)
    for count in (0, 1, 111, 112, 113, 1000):
        key, ids = key_of(OWNER, f"{count} ids"), array("I", range(count))
        cache.put(key, ids)
        assert cache.get(key, 0) == ids


def test_owner_and_text_of_a_key_do_not_run_into_each_other() -> None:
    assert key_of(Owner(b"salt"), "y text") != key_of(Owner(b"salty"), " text")
    assert key_of(Owner(b"1"), "2") != key_of(Owner(b""), "12")


def with_prefix_space(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def with_first_pieces(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")


def with_prepended(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("\u2581")])


def with_stripping_token(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True, normalized=False)])


def with_chance(tokenizer: Tokenizer) -> None:
    tokenizer.model = models.BPE(vocab={"a": 0, "<|im_end|>": 1}, merges=[], dropout=0.1)


def with_another_model(tokenizer: Tokenizer) -> None:
    tokenizer.model = models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (with_prefix_space, "space before"),
        (with_first_pieces, "Metaspace"),
        (with_prepended, "Prepend"),
        (with_stripping_token, "<mask>"),
        (with_chance, "dropout"),
        (with_another_model, "Unigram"),
    ],
)
def test_a_tokenizer_that_looks_beyond_its_piece_encodes_whole_texts_and_the_log_says_why(
    change: Callable[[Tokenizer], None], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = byte_tokenizer()
    change(tokenizer)
    cache = EncodingCache(1 << 20)
    with caplog.at_level(logging.INFO, "antiphon.gateway"):
        codec = TokenCodec(of(tokenizer), cache)
    (said,) = [record.getMessage() for record in caplog.records]
    assert why in said
    text = " a<|im_end|> a"
    if why != "dropout":
        assert codec.begin_chat(text, b"").finish().tolist() == codec.encode(text, add_special_tokens=False)
    assert len(cache) == 0


def test_a_tokenizer_without_special_tokens_encodes_whole_texts(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={character: at for at, character in enumerate("ab")}, merges=[]))
    with caplog.at_level(logging.INFO, "antiphon.gateway"):
        codec = TokenCodec(of(tokenizer), EncodingCache(1 << 20))
    assert "no added tokens" in caplog.text
    assert codec.begin_chat("abba", b"").finish().tolist() == [0, 1, 1, 0]


def test_the_metrics_say_what_was_found() -> None:
    cache = EncodingCache(1 << 20)
    metrics = GatewayMetrics()
    metrics.observe(in_flight=lambda: 0, queue_depth=lambda: 0, workers=lambda: 0, encodings=cache)
    codec = TokenCodec(TOKENIZERS["bytes"], cache)
    for _ in range(3):
        codec.begin_chat("<|im_start|>1234567890", b"").finish()
    page = metrics.page().decode()
    assert "antiphon_gateway_encoding_cache_hit_characters_total 20.0" in page
    assert "antiphon_gateway_encoding_cache_miss_characters_total 10.0" in page
    assert f"antiphon_gateway_encoding_cache_bytes {float(cache.bytes)}" in page
