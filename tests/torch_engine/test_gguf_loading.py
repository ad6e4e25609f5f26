"""A GGUF file gives the model of the folder that it was written from; quantised, the one that `transformers` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from antiphon_engine.torch_engine import TorchSettings, create_torch_executor
from antiphon_engine.torch_engine.checkpoint import inspect_checkpoint, load_checkpoint
from antiphon_engine.torch_engine.demo import default_cache_dir, fetch_gguf
from antiphon_engine.torch_engine.gguf_model.file import SUPPORTED_TYPES
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen3Config
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.support.gguf_models import Type, write_gguf_of
from tests.support.models import CHAT_TEMPLATE, SHAPES, Shape, demo_model, write_tiny_model
from tests.support.torch_engine import drive, prompts_for, requests_for

_PROMPT = torch.tensor([[5, 9, 130, 17, 4, 88, *range(20, 60)]])
_SIZES: dict[str, Any] = {
    "vocab_size": 391,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
"""Rows that the blocks of every type divide, and more embeddings than tokens."""


def _folder(folder: Path, config: Any) -> Path:
    write_tiny_model(folder)
    torch.manual_seed(11)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(_PROMPT).logits
    return logits


@pytest.mark.parametrize("shape", SHAPES)
def test_every_family_has_the_folders_logits(tmp_path: Path, shape: Shape) -> None:
    folder = write_tiny_model(tmp_path / "model", shape, seed=3)
    file = write_gguf_of(folder, tmp_path / "model.gguf", Type.BF16)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(_logits(load_checkpoint(file, dtype).model), _logits(load_checkpoint(folder, dtype).model))


_ROPE = {"rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True),
        LlamaConfig(
            **_SIZES,
            rope_parameters={
                **_ROPE,
                "rope_type": "llama3",
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        ),
        Qwen3Config(**_SIZES, rope_parameters={**_ROPE, "rope_type": "yarn", "original_max_position_embeddings": 256}),
        LlamaConfig(**_SIZES, rope_parameters={**_ROPE, "rope_type": "linear"}, rms_norm_eps=3e-5),
        MistralConfig(**_SIZES, sliding_window=24),
    ],
    ids=["biases", "llama3-rope", "yarn", "linear-rope", "window"],
)
def test_what_only_metadata_says_is_read(tmp_path: Path, config: Any) -> None:
    folder = _folder(tmp_path / "model", config)
    file = write_gguf_of(folder, tmp_path / "model.gguf")
    read, meant = inspect_checkpoint(file).config, inspect_checkpoint(folder).config
    for key, value in meant.rope_parameters.items():
        assert read.rope_parameters[key] == value, key
    assert read.rms_norm_eps == meant.rms_norm_eps
    assert torch.equal(
        _logits(load_checkpoint(file, torch.float32).model), _logits(load_checkpoint(folder, torch.float32).model)
    )


@pytest.mark.parametrize("high", [2.0, 4.0, 8.0])
@pytest.mark.parametrize(("factor", "original", "base"), [(8.0, 8192, 500000.0), (32.0, 8192, 500000.0)])
def test_llama_3s_scaling_is_found_again_from_its_factors(
    tmp_path: Path, high: float, factor: float, original: int, base: float
) -> None:
    """As published (8 and 32, high 4), and as nobody has published it."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    folder = _folder(tmp_path / "model", LlamaConfig(**{**_SIZES, "hidden_size": 64}, rope_parameters=rope))
    assert inspect_checkpoint(write_gguf_of(folder, tmp_path / "m.gguf")).config.rope_parameters == rope


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_every_type_has_the_weights_that_transformers_reads(tmp_path: Path, kind: str) -> None:
    folder = _folder(tmp_path / "model", LlamaConfig(**_SIZES))
    file = write_gguf_of(folder, tmp_path / "model.gguf", Type[kind])
    ours = load_checkpoint(file, torch.float32).model.state_dict()
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(LlamaConfig(**_SIZES))
    theirs = load_gguf_checkpoint(file, return_tensors=True, model_to_load=empty)["tensors"]
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert torch.equal(ours[name], values), name


def test_the_demo_model_as_published_is_its_folder() -> None:
    """Of 272 tensors in Q4_1, Q8_0 and F32, in the dtype that the folder was written in."""
    folder = load_checkpoint(demo_model(), torch.bfloat16).model.state_dict()
    published = fetch_gguf(default_cache_dir(), lambda _: None)
    file = load_checkpoint(published, torch.bfloat16).model.state_dict()
    assert file.keys() == folder.keys()
    for name, values in folder.items():
        assert torch.equal(file[name], values), name


def test_the_card_says_what_the_folders_says(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "Tiny")
    file = inspect_checkpoint(write_gguf_of(folder, tmp_path / "Tiny.gguf"))
    meant = inspect_checkpoint(folder)
    for key in ("architecture", "layers", "kv_heads", "head_dim", "max_context_tokens", "vocab_size"):
        assert getattr(file, key) == getattr(meant, key), key
    assert (file.bos_token, file.eos_token, file.chat_template) == ("<|im_start|>", "<|im_end|>", CHAT_TEMPLATE)
    assert file.eos_token_ids == (2, 0), "<|endoftext|> ends an answer wherever it is a special token"


def test_revision_follows_content_not_place(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    (tmp_path / "moved").mkdir()
    revision = inspect_checkpoint(write_gguf_of(folder, tmp_path / "a.gguf")).revision
    assert inspect_checkpoint(write_gguf_of(folder, tmp_path / "moved" / "b.gguf")).revision == revision

    def described(writer: gguf.GGUFWriter) -> None:
        writer.add_string("general.description", "another file")

    assert inspect_checkpoint(write_gguf_of(folder, tmp_path / "c.gguf", edit=described)).revision != revision
    other = write_tiny_model(tmp_path / "other", seed=2)
    assert inspect_checkpoint(write_gguf_of(other, tmp_path / "d.gguf")).revision != revision


@pytest.mark.parametrize(("shape", "dtype"), [("llama", "bfloat16"), ("qwen3_moe", "float32")])
def test_greedy_tokens_equal_the_folders(tmp_path: Path, shape: Shape, dtype: str) -> None:
    """Through the executor that a worker has: compiled where it can be, with its KV pool."""
    folder = write_tiny_model(tmp_path / "model", shape)
    file = write_gguf_of(folder, tmp_path / "Tiny-F32.gguf")
    settings = TorchSettings(model=str(file), dtype=dtype, kv_blocks=64, block_tokens=16, threads=1)
    outputs = []
    for told in (settings, dataclasses.replace(settings, model=str(folder), name="folder")):
        executor = create_torch_executor(told, lambda _: None)
        outputs.append(drive(executor, requests_for(prompts_for(3), 16, 12, chunks=[1 << 30, 10])))
        executor.close()
    assert outputs[0] == outputs[1]


def test_the_files_name_is_the_models(tmp_path: Path) -> None:
    file = write_gguf_of(write_tiny_model(tmp_path / "model"), tmp_path / "Tiny-F32.gguf")
    executor = create_torch_executor(TorchSettings(model=str(file), kv_blocks=4, threads=1), lambda _: None)
    assert executor.info.model == "Tiny-F32"
    executor.close()


def test_memory_while_loading_is_the_weights_and_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece that is taken out of its blocks is larger than its bound, whatever the size of a tensor."""
    from antiphon_engine.torch_engine.gguf_model import slices

    folder = _folder(tmp_path / "model", LlamaConfig(**_SIZES))
    file = write_gguf_of(folder, tmp_path / "model.gguf", Type.Q8_0)
    seen: list[int] = []
    whole: Callable[..., Any] = gguf.dequantize

    def noted(raw: Any, kind: Type) -> Any:
        values = whole(raw, kind)
        seen.append(values.size)
        return values

    monkeypatch.setattr(slices, "_PIECE_ELEMENTS", 20_000)
    monkeypatch.setattr(gguf, "dequantize", noted)
    pieces = load_checkpoint(file, torch.float32).model.state_dict()
    monkeypatch.undo()
    assert max(seen) <= 20_000
    for name, values in load_checkpoint(file, torch.float32).model.state_dict().items():
        assert torch.equal(pieces[name], values), name
