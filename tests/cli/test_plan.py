"""`antiphon plan`: what it prints, where it finds models, and how it says no."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from antiphon.__main__ import run
from antiphon.plan import run_plan
from antiphon_telemetry.exit import ExitCode

from tests.support import plan_examples

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
LARGE = str(CONFIGS / "llama-3.1-70b.json")


def test_the_table_the_shape_to_take_and_how_to_ask_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", LARGE, "--gpus", "8xH200"], {}) == ExitCode.OK
    said = capsys.readouterr().out
    assert "LlamaForCausalLM, 70,553,706,496 parameters" in said
    assert "bfloat16: weights 141.1 GB, KV 327,680 bytes a token" in said
    assert "kept back on each: 2.0 GB for driver" in said
    assert "does not fit: one rank (lacks " in said
    (taken,) = (line.split() for line in said.splitlines() if line.startswith("*"))
    assert taken[1:8] == ["tensor", "4", "4", "2", "35.3", "GB", "9.5"]
    assert said.endswith("worker: antiphon worker MODEL --tensor-parallel 4\nModel:  parallelism: {tensor: 4}\n")


def test_a_length_of_requests_has_a_column_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan([LARGE, "--gpus", "8xH200", "--context", "8192"], {}) == ExitCode.OK
    said = capsys.readouterr().out
    assert "of 131,072  of 8,192" in said
    assert "take: tensor 2, 4 replicas" in said


def test_a_replica_of_several_nodes_says_how_pods_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan([str(CONFIGS / "llama-3.1-405b.json"), "--gpus", "16xH100"], {}) == ExitCode.OK
    *_, head, other, model = capsys.readouterr().out.splitlines()
    flags = "--tensor-parallel 8 --pipeline-parallel 2 --ray-node-ranks 8"
    assert head == f"worker: antiphon worker MODEL {flags} --ray-head"
    assert other == f"        antiphon worker MODEL {flags} --ray-join HOST:6380  (on each other node)"
    assert model == "Model:  parallelism: {tensor: 8, pipeline: 2}, gpusPerPod: 8"


def test_where_nothing_fits_the_exit_code_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan([LARGE, "--gpus", "2xL4"], {}) == ExitCode.TOO_LITTLE_MEMORY
    said = capsys.readouterr().out
    assert "nothing fits: " in said
    assert " x L4 would do, as tensor 8" in said
    assert "take:" not in said


def test_json_has_every_shape_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan([LARGE, "--gpus", "8xH200", "--json"], {}) == ExitCode.OK
    report = json.loads(capsys.readouterr().out)
    assert report["parameters"] == 70_553_706_496
    assert report["gpu_memory_bytes"] == 141 * 10**9
    (chosen,) = (one for one in report["shapes"] if one["chosen"])
    assert (chosen["tensor"], chosen["replicas"], chosen["asked_contexts_in_all"]) == (4, 2, 16)
    for one in report["shapes"]:
        parts = ("weights_bytes_per_rank", "reserve_bytes_per_rank", "free_bytes_per_rank")
        assert sum(one[part] for part in parts) == report["gpu_memory_bytes"]
        assert one["fits"] == (one["blocks"] > 0)


def test_float32_doubles_and_a_given_reserve_counts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["demo", "--gpus", "1xanything", "--gpu-memory-gb", "8", "--reserve-gb", "1", "--json"]
    found = []
    for dtype in ("bfloat16", "float32"):
        assert run_plan([*words, "--dtype", dtype], {}) == ExitCode.OK
        found.append(json.loads(capsys.readouterr().out))
    assert found[1]["weights_bytes"] == 2 * found[0]["weights_bytes"] == 4 * 134_515_008
    assert found[1]["kv_bytes_per_token"] == 2 * found[0]["kv_bytes_per_token"]
    assert found[0]["shapes"][0]["reserve_bytes_per_rank"] == 10**9


def test_a_model_is_a_folder_or_what_the_hub_cache_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = tmp_path / "hub" / "models--org--large" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    shutil.copy(LARGE, snapshot / "config.json")
    for words, environment in (
        (str(snapshot), {}),
        ("hf://org/large", {"HF_HOME": str(tmp_path)}),
        ("hf://org/large", {"HF_HUB_CACHE": str(tmp_path / "hub")}),
    ):
        assert run_plan([words, "--gpus", "8xH200", "--json"], environment) == ExitCode.OK
        assert json.loads(capsys.readouterr().out)["parameters"] == 70_553_706_496


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hf://org/other", "--gpus", "8xH200"], "is not in .*hub, and nothing is downloaded here: save the model's"),
        (["hf://other", "--gpus", "8xH200"], "names no repository: write hf://ORG/NAME"),
        (["nowhere", "--gpus", "8xH200"], "nowhere cannot be read .*: name a folder that holds a config.json"),
        (["demo", "--gpus", "8xH300"], "H300 is not a known GPU"),
        (["demo", "--gpus", "8xH200", "--context", "9000"], "--context 9000: the model was made for 1 to 8192 tokens"),
        (["demo", "--gpus", "8xH200", "--reserve-gb", "-1"], "--reserve-gb -1: it has to be 0 or more"),
        (["demo"], "--gpus"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_what_to_do(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["plan", *words], {"HF_HOME": str(tmp_path)}) == ExitCode.BAD_INPUT
    told = capsys.readouterr()
    assert told.out == ""
    assert re.search(said, told.err)


def test_the_help_says_what_the_exit_codes_mean(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--help"], {}) == ExitCode.OK
    assert "3: nothing fits" in " ".join(capsys.readouterr().out.split())


def test_planning_loads_no_torch() -> None:
    code = "import sys; from antiphon.__main__ import run; run(['plan', 'demo', '--gpus', 'H200'], {}); "
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True, timeout=60)


def test_the_worked_examples_of_the_page_print_what_it_says() -> None:
    examples = plan_examples.written()
    assert len(examples) == 5
    for words, output in examples.items():
        assert output == plan_examples.printed(words), "run `python -m tests.support.plan_examples`"
