"""`antiphon simulate route`, as a person or a script meets it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from antiphon.__main__ import run
from antiphon_simulate.cells import Cell, Plan, Series, Variant, run_all, run_cell
from antiphon_simulate.policies import registry
from antiphon_simulate.records import ClusterShape, Sla
from antiphon_simulate.timings import PRESETS, TimingError, read_timing
from antiphon_simulate.traces import read_trace
from antiphon_telemetry.exit import ExitCode

from tests.support.eventually import eventually_now

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
PAGE = (ROOT / "docs" / "simulator.md").read_text()
CONVERSATION = DATA / "mooncake_conversation_first90s.jsonl"
ROUTE = ("simulate", "route", "--prefill", "2", "--decode", "2")
SMALL = (*ROUTE, "--trace", str(CONVERSATION), "--limit", "40")
PLAN = Plan(read_trace(CONVERSATION).head(40), ClusterShape(2, 2, 1024), read_timing("example-gpu"), Sla())
TIMING = {
    "chunk_tokens": 512,
    "mixed_chunk_tokens": 512,
    "block_bytes": 1000,
    "link_gigabytes_per_s": 1.0,
    "step": {
        "base_ms": 1.0,
        "per_new_token_ms": 0.1,
        "per_token_context_ms": 0.0,
        "per_sequence_ms": 0.0,
        "per_kv_token_ms": 0.0,
    },
}


def has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_object_on_stdout_has_every_figure_of_every_policy() -> None:
    words = ("--policy", "antiphon", "round_robin", "--json", "--jobs", "1")
    done = subprocess.run(
        [sys.executable, "-m", "antiphon", *SMALL, *words], capture_output=True, text=True, timeout=100, check=True
    )
    told = json.loads(done.stdout)
    assert list(told["policies"]) == ["antiphon", "round_robin", "bound"]
    assert (told["trace"]["name"], told["trace"]["requests"]) == (CONVERSATION.name, 40)
    for figures in told["policies"].values():
        assert 0.0 <= figures["prefill_hit_rate"] <= figures["ideal_hit_rate"] + 1e-9
        assert 0.0 < figures["hit_efficiency"] <= 1.0 + 1e-9
        assert figures["max_over_mean_busy"] >= 1.0
        assert figures["completed"] == 40
        for latency in ("ttft_ms", "tpot_ms"):
            assert 0.0 < figures[latency]["p50"] <= figures[latency]["p90"] <= figures[latency]["p99"]
        assert figures["goodput_rps"] > 0.0
    assert told["policies"]["bound"]["goodput_over_bound"] == 1.0
    assert "run 3: " in done.stderr  # progress


def test_ctrl_c_ends_it_and_its_processes() -> None:
    long = (*ROUTE, "--trace", str(CONVERSATION), "--policy", "round_robin", "--seeds", "200", "--jobs", "2")
    process = subprocess.Popen(
        [sys.executable, "-m", "antiphon", *long],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "run 1:" in line:
                break
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert out == ""
    assert err.endswith("antiphon: stopped; nothing was written\n")
    assert "Traceback" not in err
    eventually_now(lambda: not has_processes(process.pid))


def test_without_words_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate"], {}) == ExitCode.OK
    assert "route" in capsys.readouterr().out
    assert run(["simulate", "route", "--help"], {}) == ExitCode.OK
    told = capsys.readouterr().out
    assert all(name in told for name in registry.NAMES)


def test_the_table_has_the_policies_as_rows(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policy", "round_robin", "least_queued", "--no-goodput", "--seeds", "2", "--jobs", "1")
    assert run([*SMALL, *words], {}) == ExitCode.OK
    out, err = capsys.readouterr()
    assert re.findall(r"^(round_robin|least_queued|bound) ", out, re.M) == ["round_robin", "least_queued"]
    assert "2 seeds" in out
    assert len(re.findall(r"run \d+:", err)) == 4


def test_several_rates_give_goodput_without_more_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policy", "round_robin", "--rate-scale", "0.01", "20", "--jobs", "1", "--json")
    assert run([*SMALL, *words], {}) == ExitCode.OK
    out, err = capsys.readouterr()
    told = json.loads(out)["policies"]["round_robin"]
    assert len(re.findall(r"run \d+:", err)) == 4  # with the bound
    assert [at["rate_scale"] for at in told["at"]] == [0.01, 20.0]
    assert told["at"][0]["offered_rps"] < told["goodput_rps"] < told["at"][1]["offered_rps"]


def test_a_sweep_runs_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policy", "dynamo_cost", "--sweep", "--no-goodput", "--jobs", "1", "--json")
    assert run([*SMALL, *words], {}) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)["policies"]
    assert [one["setting"] for one in told.values()] == [None, *registry.sweep("dynamo_cost")]


@pytest.mark.parametrize("file", ["agentic_coding_three_sessions.jsonl.gz", "azure2023_code_first100.csv"])
def test_traces_of_other_kinds_run_to_the_end(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--trace", str(DATA / file), "--policy", "round_robin", "--no-goodput", "--jobs", "1", "--json")
    assert run([*ROUTE, *words], {}) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    figures = told["policies"]["round_robin"]
    assert figures["completed"] == told["trace"]["requests"]
    assert figures["unfinished"] == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        pytest.param(
            [*SMALL, "--policy", "fastest"], "there is no policy 'fastest': take one of antiphon", id="policy"
        ),
        pytest.param([*ROUTE, "--trace", "none.jsonl"], "none.jsonl cannot be read", id="trace"),
        pytest.param([*SMALL, "--timing", "h100"], "neither a preset \\(demo, example-gpu\\) nor a file", id="timing"),
        pytest.param([*SMALL, "--pool-blocks", "3", "--jobs", "1"], "blocks, a pool has 3", id="pool"),
        pytest.param([*SMALL, "--prefill", "0"], "0 is less than 1", id="no worker"),
        pytest.param([*SMALL, "--rate-scale", "0"], "0 is not more than 0", id="rate"),
        pytest.param([*SMALL, "--out", str(CONVERSATION)], "cannot be made a folder", id="out"),
        pytest.param(["simulate", "route"], "required: --trace", id="nothing"),
        pytest.param(["simulate", "scaling"], "nothing called 'scaling'", id="kind"),
    ],
)
def test_what_is_wrong_is_said_with_status_2(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words, {}) == ExitCode.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(told, err)


def test_what_is_wrong_in_a_process_of_the_pool_is_said_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--pool-blocks", "3", "--jobs", "2"], {}) == ExitCode.BAD_INPUT
    assert "blocks, a pool has 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", re.findall(r"^antiphon (simulate .*)$", PAGE, re.M), ids=lambda command: command[-40:]
)
def test_the_documented_examples_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    assert run([*shlex.split(command), "--limit", "20", "--jobs", "1"], {}) == ExitCode.OK
    out, _ = capsys.readouterr()
    assert json.loads(out)["policies"] if "--json" in command else "policy" in out
    if "--out" in command:
        written = {path.name: path.read_bytes() for path in (tmp_path / "results").iterdir()}
        assert set(written) == {"result.json", "table.txt", "plots.png", "report.html"}
        assert list(json.loads(written["result.json"])["policies"]) == ["antiphon", "least_queued", "bound"]
        assert written["table.txt"].decode() == out
        assert written["plots.png"].startswith(b"\x89PNG")


def test_the_documented_figures_are_those_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--policy", "round_robin", "--no-goodput", "--jobs", "1", "--json"], {}) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    section = PAGE.partition("## The figures")[2]
    rows = re.findall(r"^\| (`[^|]+) \|", section, re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} | {"at", "runs"} == set(
        told["policies"]["round_robin"]
    )
    for name in set(told) - {"policies"}:
        assert f"`{name}`" in section


def test_runs_side_by_side_give_what_runs_one_by_one_give() -> None:
    def told(processes: int) -> list[tuple[Cell, object]]:
        series = [Series(Variant("power_of_two"), seed, (1.0, 3.0), search=False) for seed in (0, 1)]
        results = run_all(PLAN, series, processes=processes, progress=lambda _: None)
        return sorted(((result.cell, result.figures) for result in results), key=lambda pair: repr(pair[0]))

    assert told(2) == told(1)


def test_cutting_a_run_where_all_are_late_changes_no_share() -> None:
    plan = replace(PLAN, trace=read_trace(CONVERSATION))
    cut, whole = (
        run_cell(plan, Cell(Variant("round_robin"), 50.0, 0, to_the_end=to_the_end)).figures
        for to_the_end in (False, True)
    )
    assert (cut.inside_sla, cut.inside_sla_share) == (whole.inside_sla, whole.inside_sla_share)
    assert cut.unfinished > 0
    assert whole.unfinished == 0


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_where_its_figures_come_from(name: str) -> None:
    timing = read_timing(name)
    assert timing.name == name
    assert len(timing.source) > 40
    assert timing.step.per_new_token_ms > 0.0


def test_a_timing_of_ones_own_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(TIMING))
    timing = read_timing(str(path))
    assert (timing.name, timing.chunk_tokens, timing.step.per_new_token_ms) == ("mine", 512, 0.1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"link_gigabytes_per_s": -1}, "link_gigabytes_per_s"),
        ({"step": {**TIMING["step"], "base_ms": -1}}, "base_ms"),  # type: ignore[dict-item]
        ({"step": {**TIMING["step"], "base": 1}}, "`base`"),  # type: ignore[dict-item]
        ({"step": {**TIMING["step"], "base_ms": 0, "per_new_token_ms": 0}}, "no time"),  # type: ignore[dict-item]
        ({"speed": 1}, "speed"),
    ],
)
def test_a_file_that_says_no_timing_is_refused(tmp_path: Path, change: dict[str, object], told: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**TIMING, **change}))
    with pytest.raises(TimingError, match=told):
        read_timing(str(path))
