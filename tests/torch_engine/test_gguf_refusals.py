"""GGUF files that must be refused: one sentence that says what to do, and the exit code of bad input."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from antiphon_engine.torch_engine.checkpoint import load_checkpoint
from antiphon_engine.torch_engine.errors import (
    BadModelFolder,
    DamagedCheckpoint,
    NotEnoughMemory,
    TorchEngineError,
    UnsupportedModel,
)
from antiphon_engine.torch_engine.gguf_model.configuration import read_config
from antiphon_engine.torch_engine.gguf_model.file import read_gguf

from tests.support.gguf_models import Type, write_gguf_of
from tests.support.models import write_tiny_model

Damage = Callable[[Path, Path], Path]
Edit = Callable[[gguf.GGUFWriter], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def _whole(folder: Path, target: Path) -> Path:
    return write_gguf_of(folder, target / "model.gguf")


def _with(edit: Edit) -> Damage:
    return lambda folder, target: write_gguf_of(folder, target / "model.gguf", edit=edit)


def _cut(size: int) -> Damage:
    """To `size` bytes, or by so many if it is negative."""

    def damage(folder: Path, target: Path) -> Path:
        file = _whole(folder, target)
        os.truncate(file, size if size >= 0 else file.stat().st_size + size)
        return file

    return damage


def _changed(place: int, content: bytes) -> Damage:
    def damage(folder: Path, target: Path) -> Path:
        file = _whole(folder, target)
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(content)
        return file

    return damage


def _renamed(name: str) -> Damage:
    return lambda folder, target: _whole(folder, target).rename(target / name)


def _set(key: str, value: object) -> Edit:
    """In place of what the writer has."""

    def edit(writer: gguf.GGUFWriter) -> None:
        old = writer.kv_data[0].pop(key, None)
        kind = old.type if old is not None else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)

    return edit


def _drop(key: str) -> Edit:
    return lambda writer: writer.kv_data[0].pop(key) and None


def _also_a_tensor(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_sinks.weight", torch.zeros(4).numpy())


def _other_factors(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", torch.arange(1, 17).float().numpy())


def _two_bit(folder: Path, target: Path) -> Path:
    file = _whole(folder, target)
    content = file.read_bytes()
    name = b"blk.0.attn_q.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8  # behind its two dimensions
    assert content[place : place + 4] == struct.pack("<I", Type.F32)
    file.write_bytes(content[:place] + struct.pack("<I", Type.Q2_K) + content[place + 4 :])
    return file


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (lambda folder, target: target / "model.gguf", BadModelFolder, "there is no file"),
        (_changed(0, b"PK\3\4"), DamagedCheckpoint, "is not a GGUF file"),
        (_cut(0), DamagedCheckpoint, "it is cut off"),
        (_cut(300), DamagedCheckpoint, "it is cut off"),
        (_cut(-1000), DamagedCheckpoint, "it is cut off: it has"),
        (_changed(4, struct.pack("<I", 1)), UnsupportedModel, "has version 1 of the format, and 2 and 3 can be read"),
        (_changed(4, struct.pack(">I", 3)), UnsupportedModel, "in little-endian order"),
        (_changed(16, struct.pack("<Q", 1 << 60)), DamagedCheckpoint, "is damaged"),
        (_renamed("model-00002-of-00003.gguf"), UnsupportedModel, "one of 3 parts of a model: join them"),
        (_with(_set("split.count", 4)), UnsupportedModel, "one of 4 parts of a model: join them"),
        (_with(_set("general.architecture", "gemma3")), UnsupportedModel, "gemma3, which is not supported: use one of"),
        (_with(_set("llama.rope.scaling.type", "longrope")), UnsupportedModel, "rotary scaling 'longrope'"),
        (_with(_set("llama.rope.dimension_count", 16)), UnsupportedModel, "rotates 16 of 32 dimensions"),
        (_with(_set("llama.attention.value_length", 64)), UnsupportedModel, "heads of 32 for keys and 64 for values"),
        (_with(_set("llama.attention.head_count_kv", 4)), DamagedCheckpoint, "wrong shape for the tensor blk.0.attn_k"),
        (_with(_set("llama.block_count", 3)), DamagedCheckpoint, "lacks the tensor blk.2.attn_k.weight and 8 more"),
        (_with(_drop("llama.context_length")), DamagedCheckpoint, "does not say llama.context_length"),
        (_with(_set("tokenizer.ggml.model", "t5")), UnsupportedModel, "'t5': only gpt2 and llama"),
        (_with(_set("tokenizer.ggml.pre", "gemma4")), UnsupportedModel, "pre-tokenizer 'gemma4', which is not known"),
        (_with(_drop("tokenizer.ggml.pre")), UnsupportedModel, "one of gpt-2, smollm, llama-bpe"),
        (_with(_drop("tokenizer.ggml.tokens")), DamagedCheckpoint, "does not say tokenizer.ggml.tokens"),
        (_with(_drop("tokenizer.ggml.merges")), DamagedCheckpoint, "does not say tokenizer.ggml.merges"),
        (_with(_set("tokenizer.ggml.merges", ["a"])), DamagedCheckpoint, "is no pair"),
        (_with(_set("tokenizer.ggml.merges", ["a zz"])), DamagedCheckpoint, "do not fit its tokens"),
        (_with(_set("tokenizer.ggml.token_type", [1, 1])), DamagedCheckpoint, "not one type for each token"),
        (_with(_set("tokenizer.ggml.eos_token_id", 9999)), DamagedCheckpoint, "eos_token_id: 9999, of 358 tokens"),
        (_with(_also_a_tensor), UnsupportedModel, "has the tensor blk.0.attn_sinks.weight, which no LlamaForCausalLM"),
        (_with(_other_factors), UnsupportedModel, "rope_freqs.weight that no scaling known here gives"),
        (_two_bit, UnsupportedModel, "in Q2_K, which cannot be read: use a file whose tensors are in F32, F16, BF16"),
    ],
)
def test_refused_in_one_sentence(
    folder: Path, tmp_path: Path, damage: Damage, kind: type[TorchEngineError], words: str
) -> None:
    file = damage(folder, tmp_path)
    with pytest.raises(TorchEngineError) as caught:
        load_checkpoint(file, torch.float32)
    assert words in str(caught.value)
    assert type(caught.value) is kind
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    file = write_gguf_of(folder, tmp_path / "model.gguf", without="blk.1.ffn_up.weight")
    with pytest.raises(DamagedCheckpoint, match=r"lacks the tensor blk\.1\.ffn_up\.weight: get another conversion"):
        load_checkpoint(file, torch.float32)


def test_too_little_memory_is_refused_before_loading(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotEnoughMemory, match="are available: free memory"):
        load_checkpoint(_whole(folder, tmp_path), torch.float32, available_bytes=1_000_000)


def test_a_window_in_some_layers_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen2")
    file = write_gguf_of(folder, tmp_path / "model.gguf", edit=_set("qwen2.attention.sliding_window", 64))
    with pytest.raises(UnsupportedModel, match="sliding window in some of its layers only"):
        read_config(read_gguf(file))
