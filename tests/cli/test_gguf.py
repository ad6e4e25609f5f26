"""A GGUF file where a model's folder could stand: `antiphon plan`, `prepare` and `serve`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from antiphon.plan import run_plan
from antiphon.prepare import prepare
from antiphon_engine.torch_engine import default_cache_dir
from antiphon_telemetry.exit import ExitCode
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tests.support.gguf_models import Type, write_gguf_of
from tests.support.models import SHAPES, Shape, demo_model, write_tiny_model
from tests.support.reference import assert_same, reference_greedy
from tests.support.serve import running_serve

OUTPUT_TOKENS = 16
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
PROMPT = "The lighthouse keeper counted 37 steps to the lamp every evening, and"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_for_the_file_is_that_for_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: Shape
) -> None:
    folder = write_tiny_model(tmp_path / "model", shape)
    file = write_gguf_of(folder, tmp_path / "model.gguf")
    plans = []
    for model in (folder, file):
        assert run_plan([str(model), "--gpus", "2xL4", "--json"], {}) == ExitCode.OK
        plan = json.loads(capsys.readouterr().out)
        del plan["model"], plan["architecture"]  # a Mistral without a window is a Llama here
        plans.append(plan)
    assert plans[0] == plans[1]


def test_a_plan_finds_a_file_in_the_hubs_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    write_gguf_of(write_tiny_model(tmp_path / "model"), snapshot / "tiny.gguf")
    environment = {"HF_HUB_CACHE": str(tmp_path)}
    assert run_plan(["hf://org/tiny/tiny.gguf", "--gpus", "1xL4"], environment) == ExitCode.OK
    assert run_plan(["hf://org/tiny/other.gguf", "--gpus", "1xL4"], environment) == ExitCode.BAD_INPUT
    assert "save the model's other.gguf and name that file" in capsys.readouterr().err


def test_a_file_that_cannot_be_served_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.gguf"
    assert prepare(str(file), "torch", str(tmp_path)) == ExitCode.BAD_INPUT
    assert "there is no file" in capsys.readouterr().err
    file.write_bytes(b"not one")
    for command in (lambda: prepare(str(file), "torch", ""), lambda: run_plan([str(file), "--gpus", "1xL4"], {})):
        assert command() == ExitCode.BAD_INPUT
        assert f"{file} is not a GGUF file: get the file again" in capsys.readouterr().err


def _first_layers(folder: Path, count: int) -> Path:
    """Of the demo model: its vocabulary and its weights, and little to compute."""
    folder.mkdir()
    for path in demo_model().glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
    with safe_open(demo_model() / "model.safetensors", framework="pt") as weights:
        layers = {name: _LAYER.match(name) for name in weights.keys()}  # noqa: SIM118  (it cannot be iterated)
        kept = [name for name, layer in layers.items() if layer is None or int(layer[1]) < count]
        tensors = {name: weights.get_tensor(name) for name in kept}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.timeout(300)
def test_a_file_answers_as_its_folder_through_gateway_and_worker(tmp_path: Path) -> None:
    """The file's tokenizer, its weights, and its name."""
    folder = _first_layers(tmp_path / "demo", 2)
    file = write_gguf_of(folder, tmp_path / "SmolLM2-BF16.gguf", Type.BF16, pre="smollm")
    prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids
    reference = reference_greedy(folder, prompt, OUTPUT_TOKENS)
    options = ("--prefill", "0", "--dtype", "float32", "--kv-memory-gb", "0.2", "--threads", "1")
    cache = ("--cache-dir", str(default_cache_dir()), "--no-self-measure")
    with (
        running_serve(str(file), *options, *cache) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as client,
    ):
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["SmolLM2-BF16"]
        body = {
            "model": "SmolLM2-BF16",
            "prompt": PROMPT,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["prompt_token_ids"] == prompt
        assert assert_same(choice["token_ids"], reference) == OUTPUT_TOKENS
