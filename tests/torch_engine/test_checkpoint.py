"""Folders that load, and folders that must be refused: one sentence, an exit code, and nothing made up."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from antiphon_engine.torch_engine import TorchSettings, create_torch_executor
from antiphon_engine.torch_engine.checkpoint import inspect_checkpoint, load_checkpoint
from antiphon_engine.torch_engine.errors import (
    BadModelFolder,
    BadSettings,
    DamagedCheckpoint,
    NotEnoughMemory,
    TorchEngineError,
    UnsupportedModel,
)
from antiphon_engine.torch_engine.system_memory import available_memory_bytes
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.models import CHAT_TEMPLATE, SHAPES, Shape, write_tiny_model

_PROMPT = torch.tensor([[5, 9, 130, 17, 4, 88]])


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=1)


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_shape_loads_with_the_logits_of_the_library(tmp_path: Path, shape: Shape, dtype: torch.dtype) -> None:
    folder = write_tiny_model(tmp_path, shape, seed=3)
    loaded = load_checkpoint(folder, dtype)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {dtype}
    assert not loaded.model.training
    with torch.inference_mode():
        assert torch.equal(loaded.model(_PROMPT).logits, reference(_PROMPT).logits)


def test_the_folder_says_what_the_model_is(tiny_folder: Path) -> None:
    info = inspect_checkpoint(tiny_folder)
    assert info.architecture == "LlamaForCausalLM"
    assert (info.layers, info.kv_heads, info.head_dim, info.max_context_tokens) == (2, 2, 32, 1024)
    assert info.eos_token_ids == (2,)
    assert (info.bos_token, info.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert info.chat_template == CHAT_TEMPLATE
    assert info.tokenizer_json == (tiny_folder / "tokenizer.json").read_bytes()


def test_nothing_is_looked_for_on_the_network(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a network connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_checkpoint(tiny_folder, torch.float32)


def test_eos_ids_come_from_generation_config_and_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert inspect_checkpoint(folder).eos_token_ids == (7, 2)
    (folder / "generation_config.json").unlink()
    _edit_config(folder, eos_token_id=None)
    assert inspect_checkpoint(folder).eos_token_ids == (2,), "the tokenizer's eos token is the last resort"


def test_the_template_file_goes_before_tokenizer_config(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("from the file")
    assert inspect_checkpoint(folder).chat_template == "from the file"


def test_of_several_templates_the_default_one_is_taken(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": {"content": "x"}}))
    info = inspect_checkpoint(folder)
    assert (info.chat_template, info.eos_token, info.bos_token) == ("yes", "x", "")


def test_revision_follows_content_not_place_or_name(tiny_folder: Path, folder: Path, tmp_path: Path) -> None:
    revision = inspect_checkpoint(tiny_folder).revision
    assert inspect_checkpoint(folder).revision == revision
    other = write_tiny_model(tmp_path / "other", "llama", seed=2)
    assert (other / "config.json").read_bytes() == (tiny_folder / "config.json").read_bytes()
    assert inspect_checkpoint(other).revision != revision, "same shapes, other training"
    _edit_config(folder, rms_norm_eps=1e-3)
    assert inspect_checkpoint(folder).revision != revision


def test_shards_load_as_one_model(folder: Path) -> None:
    whole = load_checkpoint(folder, torch.float32).model(_PROMPT).logits
    _shard(folder)
    assert torch.equal(load_checkpoint(folder, torch.float32).model(_PROMPT).logits, whole)


def _shard(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"part-1.safetensors": names[::2], "part-2.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({name: weights[name] for name in chosen}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, chosen in parts.items() for name in chosen}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# ------------------------------------------------------------------ refusals


def _break_architecture(folder: Path) -> None:
    _edit_config(folder, architectures=["GPT2LMHeadModel"], model_type="gpt2")


def _break_quantised(folder: Path) -> None:
    _edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})


def _break_model_type(folder: Path) -> None:
    _edit_config(folder, model_type="qwen2")


def _break_rope(folder: Path) -> None:
    _edit_config(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})


def _break_config_missing(folder: Path) -> None:
    (folder / "config.json").unlink()


def _break_config_text(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [')


def _break_config_kind(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def _break_config_values(folder: Path) -> None:
    _edit_config(folder, num_attention_heads="many")


def _break_truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)


def _break_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def _break_garbage(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)


def _break_empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _break_only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _break_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _break_shard_missing(folder: Path) -> None:
    _shard(folder)
    (folder / "part-2.safetensors").unlink()


def _break_shard_outside(folder: Path) -> None:
    _shard(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("part-2.safetensors", "../part-2.safetensors"))


def _break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')


def _break_tensor_missing(folder: Path) -> None:
    _edit_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))


def _break_tensor_shape(folder: Path) -> None:
    _edit_weights(
        folder, lambda weights: weights.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 5).bfloat16()})
    )


def _break_tokenizer_missing(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _break_tokenizer_text(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (_break_architecture, UnsupportedModel, "GPT2LMHeadModel, which is not supported: use one of LlamaForCausalLM"),
        (_break_quantised, UnsupportedModel, "quantised (gptq)"),
        (_break_rope, UnsupportedModel, "dynamic"),
        (_break_model_type, BadModelFolder, "model_type 'qwen2'"),
        (_break_config_missing, BadModelFolder, "has no config.json"),
        (_break_config_text, BadModelFolder, "config.json is not JSON"),
        (_break_config_kind, BadModelFolder, "config.json is not a JSON object"),
        (_break_config_values, BadModelFolder, "does not describe a model"),
        (_break_truncated, DamagedCheckpoint, "model.safetensors is damaged (it has"),
        (_break_header, DamagedCheckpoint, "its header is cut off"),
        (_break_garbage, DamagedCheckpoint, "its header is cut off"),
        (_break_empty, DamagedCheckpoint, "its header is cut off"),
        (_break_only_pickles, BadModelFolder, "pytorch_model.bin"),
        (_break_no_weights, BadModelFolder, "neither model.safetensors nor"),
        (_break_shard_missing, DamagedCheckpoint, "lacks part-2.safetensors"),
        (_break_shard_outside, DamagedCheckpoint, "outside the folder"),
        (_break_index, DamagedCheckpoint, "not a safetensors index"),
        (_break_tensor_missing, DamagedCheckpoint, "model.layers.1.mlp.up_proj.weight"),
        (_break_tensor_shape, DamagedCheckpoint, "up_proj"),
        (_break_tokenizer_missing, BadModelFolder, "has no tokenizer.json"),
        (_break_tokenizer_text, BadModelFolder, "tokenizer.json cannot be read"),
    ],
)
def test_refused_in_one_sentence(
    folder: Path, damage: Callable[[Path], None], kind: type[TorchEngineError], words: str
) -> None:
    damage(folder)
    with pytest.raises(TorchEngineError) as caught:
        load_checkpoint(folder, torch.float32)
    assert type(caught.value) is kind
    assert caught.value.exit_code == 2
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", ["mixtral", "qwen3_moe"])
def test_one_missing_expert_is_noticed(tmp_path: Path, shape: Shape) -> None:
    """Experts are stacked into one tensor while they are loaded; a hole in the stack is damage all the same."""
    folder = write_tiny_model(tmp_path, shape)
    name = next(name for name in load_file(folder / "model.safetensors") if "experts.3" in name)
    _edit_weights(folder, lambda weights: weights.pop(name))
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(folder, torch.float32)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(BadModelFolder, match="is not a folder"):
        load_checkpoint(tmp_path / "nowhere", torch.float32)


def test_too_little_memory_is_refused_before_loading(tiny_folder: Path) -> None:
    with pytest.raises(NotEnoughMemory, match="are available: free memory") as caught:
        load_checkpoint(tiny_folder, torch.float32, available_bytes=1_000_000)
    assert caught.value.exit_code == 3


# ------------------------------------------------------------------ memory of the system


def test_available_memory_is_the_tightest_limit(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroup / "a" / "b").mkdir(parents=True)
    assert available_memory_bytes(proc, cgroup) is None
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert available_memory_bytes(proc, cgroup) == 8000 * 1024
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    (cgroup / "a" / "memory.max").write_text("5000000\n")
    (cgroup / "a" / "memory.current").write_text("3000000\n")
    (cgroup / "a" / "memory.stat").write_text("anon 1\ninactive_file 1000000\n")
    (cgroup / "a" / "b" / "memory.max").write_text("max\n")
    (cgroup / "a" / "b" / "memory.current").write_text("3000000\n")
    assert available_memory_bytes(proc, cgroup) == 3_000_000


# ------------------------------------------------------------------ factory


def test_factory_makes_the_card_and_the_pool(tiny_folder: Path) -> None:
    lines: list[str] = []
    settings = TorchSettings(
        model=str(tiny_folder), name="tiny", dtype="float32", kv_blocks=8, block_tokens=16, threads=1
    )
    executor = create_torch_executor(settings, lines.append)
    info = executor.info
    assert (info.model, info.kv_format, info.architecture) == ("tiny", "float32/16/full", "LlamaForCausalLM")
    assert info.kv_block_bytes == 2 * 2 * 2 * 16 * 32 * 4 == executor.kv.block_bytes
    assert executor.kv.num_blocks == 8
    assert info.max_context_tokens == 1024
    assert any(line.startswith("loading tiny") for line in lines)
    executor.close()


def test_factory_sizes_the_pool_by_memory(tiny_folder: Path) -> None:
    settings = TorchSettings(model=str(tiny_folder), dtype="float32", kv_memory_gb=0.001, block_tokens=16, threads=1)
    executor = create_torch_executor(settings, lambda _: None)
    assert executor.kv.num_blocks == 1_000_000 // executor.kv.block_bytes
    executor.close()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"dtype": "float16"}, BadSettings),
        ({"max_context_tokens": 4096}, BadSettings),
        ({"block_tokens": 0}, BadSettings),
        ({"kv_memory_gb": 1e-9}, BadSettings),
        ({"kv_blocks": 1 << 40}, NotEnoughMemory),
    ],
)
def test_factory_refuses(tiny_folder: Path, changes: dict[str, object], kind: type[TorchEngineError]) -> None:
    settings = TorchSettings(**{"model": str(tiny_folder), **changes})  # type: ignore[arg-type]
    with pytest.raises(kind):
        create_torch_executor(settings, lambda _: None)
