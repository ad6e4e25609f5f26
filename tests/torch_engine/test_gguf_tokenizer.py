"""Tokenizers out of GGUF files give the ids of the tokenizers that the files were written from, in many scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import gguf
import pytest
from antiphon_engine.torch_engine.checkpoint import inspect_checkpoint
from antiphon_engine.torch_engine.demo import default_cache_dir, fetch_gguf
from antiphon_engine.torch_engine.gguf_model.file import read_gguf
from antiphon_engine.torch_engine.gguf_model.tokenizer import build_tokenizer
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from tests.support.gguf_models import write_vocabulary_of
from tests.support.models import demo_model

TEXTS = (
    "The quick brown fox doesn't jump; it's 12345.67 metres, they'LL say.\r\n\r\n  \tdef f(x):\n    return x**2\n\n\n",
    "Größe, naïve, café (composed) and cafe\u0301 (not); ﬁ Ⅷ ½",
    "Быстрая лиса. Γρήγορη αλεπού. שועל מהיר. الثعلب السريع. तेज़ लोमड़ी १२३.",
    "敏捷的狐狸。すばやいキツネ。빠른 여우. สุนัขจิ้งจอก",
    "👩‍💻🏳️‍🌈 \u200b\ufeff\x00\x7f 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "<|im_start|>user\nHi <think>hm</think> there<|im_end|>\n <|im_start|> x<|endoftext|>",
    "",
    " ",
    "  two before, two after  ",
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_OWN = "<think>"


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _assert_same(read: Tokenizer, original: Tokenizer) -> None:
    for text in TEXTS:
        assert _ids(read, text) == _ids(original, text), text
        ids = _ids(original, text)
        assert read.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
        assert read.decode(ids) == original.decode(ids)


def _read(folder: Path, original: Tokenizer, *, pre: str = "gpt-2", **special: str) -> Tokenizer:
    """The tokenizer of a GGUF file that was written from `original`."""
    original.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({f"{name}_token": text for name, text in special.items()}))
    return build_tokenizer(read_gguf(write_vocabulary_of(folder, folder / "model.gguf", pre=pre)))


def _byte_level(split: pre_tokenizers.PreTokenizer, *, whole_words: bool = False) -> Tokenizer:
    """Trained on the texts, with merges to spare."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = split
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(TEXTS * 2, trainer)
    content = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in content["merges"]]
    # Fewer merges than tokens: where whole words count, a word is found that merges do not make.
    kept = merges[:-20] if whole_words else merges
    vocabulary = {**content["vocab"], _OWN: len(content["vocab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=kept, ignore_merges=whole_words))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(_OWN, normalized=False, special=False)])
    return tokenizer


def _split(name: str) -> pre_tokenizers.PreTokenizer:
    """With the expression that `transformers` has for the name."""
    expression = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
    return pre_tokenizers.Sequence([expression, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3", "tekken", "qwen2", "deepseek-r1-qwen"])
def test_byte_level_ids_are_the_originals(tmp_path: Path, pre: str) -> None:
    original = _byte_level(_split(pre), whole_words=pre not in ("qwen2", "deepseek-r1-qwen"))
    if pre == "qwen2":
        original.normalizer = normalizers.NFC()  # as Qwen2Tokenizer has it
    _assert_same(_read(tmp_path, original, pre=pre), original)


def test_digits_are_split_only_where_the_name_says_so(tmp_path: Path) -> None:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    for name, split in (("gpt-2", plain), ("smollm", digits)):
        original = _byte_level(plain)  # with tokens of several digits
        assert len(_ids(original, "12345")) < 5
        original.pre_tokenizer = split
        _assert_same(_read(tmp_path, original, pre=name), original)


def test_the_demo_models_ids_are_its_folders(tmp_path: Path) -> None:
    """Out of the file that it is published as."""
    folder = demo_model()
    file = inspect_checkpoint(fetch_gguf(default_cache_dir(), lambda _: None))
    original = inspect_checkpoint(folder)
    _assert_same(Tokenizer.from_buffer(file.tokenizer_json), Tokenizer.from_buffer(original.tokenizer_json))
    assert file.chat_template == original.chat_template
    assert (file.bos_token, file.eos_token) == (original.bos_token, original.eos_token)
    assert file.eos_token_ids[0] == original.eos_token_ids[0]


# ------------------------------------------------------------------ SentencePiece


def _pieces() -> Tokenizer:
    """As in Llama 2's tokenizer.json: bytes for what has no piece, a space before a text."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=560, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False, limit_alphabet=60
    )
    trained.train_from_iterator(["the cat sat on the mat, and the other cat sat there: Größe, лиса"] * 3, trainer)
    content = json.loads(trained.to_str())["model"]
    model = models.BPE(
        vocab=content["vocab"],
        merges=[tuple(pair) for pair in content["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = trained.normalizer
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = [AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>", "</s>")]
    tokenizer.add_special_tokens(special)
    return tokenizer


def _by_score(tokens: Sequence[str], text: str) -> list[int]:
    """SentencePiece's way, slow and plain: of all neighbours that make a piece, the one of the best score first."""
    ids = {token: index for index, token in enumerate(tokens)}
    symbols = list(("\u2581" + text).replace(" ", "\u2581")) if text else []
    while True:
        pairs = [(ids.get(symbols[at] + symbols[at + 1], 1 << 30), at) for at in range(len(symbols) - 1)]
        best, at = min(pairs, default=(1 << 30, 0))
        if best == 1 << 30:
            break
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    known = [
        [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()] for symbol in symbols
    ]
    return [index for one in known for index in one]


def test_sentence_piece_ids_are_the_originals(tmp_path: Path) -> None:
    original = _pieces()
    read = _read(tmp_path, original, unk="<unk>", bos="<s>", eos="</s>")
    _assert_same(read, original)
    vocabulary = original.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    for text in (*TEXTS[:5], *TEXTS[6:], "there sat the catthe matand"):
        assert _ids(read, text) == _by_score(tokens, text)
    assert _ids(read, "</s>the cat") == [2, *_by_score(tokens, "the cat")], "a space after a special token too"


@pytest.mark.parametrize("prefixed", [True, False])
def test_a_space_goes_before_a_text_as_the_file_says(tmp_path: Path, prefixed: bool) -> None:
    _read(tmp_path, _pieces(), unk="<unk>", bos="<s>")
    file = write_vocabulary_of(tmp_path, tmp_path / "m.gguf", edit=lambda writer: writer.add_add_space_prefix(prefixed))
    read = build_tokenizer(read_gguf(file))
    assert read.encode("the", add_special_tokens=False).tokens[0].startswith("\u2581") is prefixed
    assert read.decode(_ids(read, "the cat")) == "the cat"


# ------------------------------------------------------------------ around a text


@pytest.mark.parametrize(
    ("pre", "told", "first"),
    [("llama-bpe", None, [1]), ("llama-bpe", False, []), ("qwen2", None, []), ("qwen2", True, [1])],
)
def test_a_first_token_is_added_as_the_file_or_the_pre_tokenizer_says(
    tmp_path: Path, pre: str, told: bool | None, first: list[int]
) -> None:
    _read(tmp_path, _byte_level(_split(pre)), pre=pre, bos="<|im_start|>", eos="<|im_end|>")

    def edit(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.add_bos_token"]
        if told is not None:
            writer.add_add_bos_token(told)
        writer.add_add_eos_token(bool(told))

    read = build_tokenizer(read_gguf(write_vocabulary_of(tmp_path, tmp_path / "m.gguf", pre=pre, edit=edit)))
    assert read.encode("fox").ids == [*first, *_ids(read, "fox"), *([2] if told else [])]
