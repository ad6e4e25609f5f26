"""`antiphon simulate autoscale` and `replay`, as a person or a script meets them."""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import re
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
from antiphon.__main__ import run as antiphon
from antiphon_simulate.autoscale import command
from antiphon_simulate.autoscale.capacity import mean_work_ms
from antiphon_simulate.autoscale.figures import ScaleFigures
from antiphon_simulate.autoscale.goal import Goal, GoalError, read_goal
from antiphon_simulate.autoscale.loads import SHAPES, copied, generated, servegen
from antiphon_simulate.autoscale.options import add_load_options, read_requests, read_setting
from antiphon_simulate.autoscale.registry import NAMES

ROOT = Path(__file__).parents[3]
CODE = ROOT / "tests" / "data" / "azure2023_code_first100.csv"
SMALL = (
    *("simulate", "autoscale", "--trace", str(CODE), "--sla", "ttft=1s,perThousand=60ms,tpot=40ms"),
    *("--oracle-runs", "3", "--start", "20s", "--interval", "20s"),
)


def test_the_object_on_stdout_has_every_figure_of_every_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decisions = tmp_path / "decisions.jsonl.gz"
    words = ("--json", "--decisions", str(decisions), "--out", str(tmp_path / "out"))
    done = subprocess.run(
        [sys.executable, "-m", "antiphon", *SMALL, *words], capture_output=True, text=True, timeout=100, check=True
    )
    told = json.loads(done.stdout)
    assert tuple(told["policies"]) == NAMES
    for found in told["policies"].values():
        assert 0.0 <= found["attainment"] <= 1.0
        assert found["gpu_hours"] > 0.0
        assert found["gpu_hours_over_bound"] >= found["gpu_hours_over_oracle"]
        assert found["unended"] == 0
        for name in ("infeasible_share", "mean_replicas", "reversals_per_10_min", "seconds_back_in_sla"):
            assert found[name] >= 0.0
    assert told["oracle"]["bound_gpu_hours"] <= told["oracle"]["gpu_hours"]
    assert told["oracle"]["attainment"] >= told["goal"]["target"]
    assert 0.0 <= told["causal_attainment"] <= 1.0
    assert told["allowed_gpu_hours"] > told["oracle"]["gpu_hours"]
    assert told["asked_attainment"] <= told["goal"]["target"]
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"result.json", "table.txt", "plots.png", "report.html"}
    assert (tmp_path / "out" / "plots.png").read_bytes().startswith(b"\x89PNG")

    capsys.readouterr()
    assert antiphon(["simulate", "replay", str(decisions), "--json"], {}) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["decisions"] > 3
    assert again["differences"] == []

    # However it is compressed.
    plain = gzip.decompress(decisions.read_bytes())
    (tmp_path / "decisions.jsonl.xz").write_bytes(lzma.compress(plain, preset=0))
    assert antiphon(["simulate", "replay", str(tmp_path / "decisions.jsonl.xz"), "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out) == again

    # A decision that the inputs do not lead to is found.
    lines = plain.splitlines()
    other = json.loads(lines[1])
    other["sentence"] = "because"
    (tmp_path / "changed.jsonl").write_bytes(b"\n".join([lines[0], json.dumps(other).encode()]))
    assert antiphon(["simulate", "replay", str(tmp_path / "changed.jsonl")], {}) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--load", "step", "--sla", "ttft=500"), "is no duration"),
        (("--load", "step", "--sla", "ttft=500ms"), "say both ttft and tpot"),
        (("--load", "step", "--sla", "ttft=500ms,tpot=40ms,e2e=1s"), "is not one of"),
        (("--load", "step", "--sla", "ttft=500ms,tpot=40ms", "--target", "99"), "between 0 and 1"),
        (("--load", "step", "--sla", "ttft=500ms,tpot=40ms", "--policy", "magic"), "no scaling policy 'magic'"),
        (("--trace", "nowhere.csv", "--sla", "ttft=500ms,tpot=40ms"), "cannot be read"),
        (("--load", "step", "--sla", "ttft=1s,tpot=1s", "--min-decode", "9", "--max-decode", "3"), "smallest pool"),
    ],
)
def test_wrong_words_are_answered_with_a_sentence(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert antiphon(["simulate", "autoscale", *words], {}) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_the_documented_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "simulator.md").read_text()
    section = page.partition("## Scaling")[2].partition("\n## ")[0]
    examples = [shlex.split(line) for line in re.findall(r"^\$ antiphon (simulate .*)$", section, re.M)]
    assert [example[1] for example in examples] == ["autoscale", "autoscale", "replay", "plan"]
    less = {"autoscale": ["--limit", "20", "--oracle-runs", "2", "--interval", "30s"], "plan": ["--limit", "20"]}
    for example in examples:
        assert antiphon([*example, *less.get(example[1], [])], {}) == 0
    assert re.search(r"^([1-9]\d*) decisions, \1 replay to the same result$", capsys.readouterr().out, re.M)


def test_every_figure_is_defined() -> None:
    section = (ROOT / "docs" / "simulator.md").read_text().partition("### What `--json` has")[2].partition("\n## ")[0]
    defined = {name for row in re.findall(r"^\| (`[^|]+) \|", section, re.M) for name in re.findall(r"`(\w+)`", row)}
    figures = {field.name for field in fields(ScaleFigures)} - {"requests", "took_s"}
    of_the_study = {"gpu_hours_over_oracle", "gpu_hours_over_bound", "extra_replicas", "within_cost", "keeps_promise"}
    assert defined == figures | of_the_study


def test_what_holds_no_decisions_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, said in (
        (b"", "no decisions"),
        (b"{}\n", "one decision as JSON"),
        (b"\x1f\x8b1", "cannot be read"),
        (b"\xfd7zXZ1", "cannot be read"),
    ):
        (tmp_path / "file").write_bytes(content)
        assert antiphon(["simulate", "replay", str(tmp_path / "file")], {}) == 2
        assert said in capsys.readouterr().err


def test_a_goal_is_read_with_units_and_grows_with_what_is_uncached() -> None:
    goal = read_goal("ttft=500ms,perThousand=60ms,tpot=0.04s", 0.99)
    assert goal == Goal(500.0, 40.0, 60.0, 0.99)
    assert goal.ttft_limit_ms(2000) == 620.0
    promise = goal.promise()
    assert promise.ttft is not None
    assert promise.ttft.percentile == pytest.approx(0.995)  # half of the misses each
    with pytest.raises(GoalError):
        read_goal("ttft=0ms,tpot=40ms", 0.99)


def test_generated_loads_have_the_rates_of_their_names() -> None:
    assert set(SHAPES) == {"constant", "step", "ramp", "spike", "sawtooth"}
    step = [request.arrival_ms / 1000.0 for request in generated("step", peak_rps=9.0)]
    before = sum(at_s < 600.0 for at_s in step) / 600.0
    during = sum(600.0 <= at_s < 1200.0 for at_s in step) / 600.0
    assert before == pytest.approx(3.0, rel=0.15)
    assert during == pytest.approx(9.0, rel=0.1)
    assert generated("spike", peak_rps=5.0, seed=3) == generated("spike", peak_rps=5.0, seed=3)
    saw = [SHAPES["sawtooth"](at_s) for at_s in (0.0, 299.9, 300.0)]
    assert saw == pytest.approx([0.2, 1.0, 0.2], abs=0.01)
    assert [SHAPES["spike"](at_s) for at_s in (599.0, 601.0, 661.0, 1201.0)] == [0.25, 1.0, 0.25, 1.0]


def test_a_larger_service_has_the_ups_and_downs_of_the_trace() -> None:
    requests = generated("step", peak_rps=3.0)
    many = copied(requests, 4, seed=1)
    assert len(many) == 4 * len(requests)
    assert [request.index for request in many] == list(range(len(many)))
    assert all(one.arrival_ms <= other.arrival_ms for one, other in pairwise(many))
    for at_s in (300.0, 900.0, 1500.0):
        before = sum(request.arrival_ms < 1000.0 * at_s for request in requests)
        assert sum(request.arrival_ms < 1000.0 * at_s for request in many) == pytest.approx(4 * before, rel=0.05)
    # Nobody's prompt is in another copy's cache.
    assert len({block for request in many for block in request.blocks}) == 4 * len(
        {block for request in requests for block in request.blocks}
    )
    closed = [replace(requests[0], after=None), replace(requests[1], after=0)]
    sessions = copied(closed, 3, seed=1)
    followers = [one for one in sessions if one.after is not None]
    assert len(followers) == 3
    assert len({one.after for one in followers}) == 3
    # Each follows the first request of its own copy.
    assert {sessions[one.after or 0].prompt_tokens for one in followers} == {requests[0].prompt_tokens}


def test_days_of_a_service_come_at_its_rates_thinned(tmp_path: Path) -> None:
    (tmp_path / "rates.csv").write_text(
        "model,window_start_s,rate_rps,active_clients,top_client_share,rate_weighted_cv\n"
        "a,0,100,1,1,1\na,600,300,1,1,1\nb,0,1,1,1,1\n"
    )
    (tmp_path / "servegen_lengths.csv").write_text(
        "model,clients_present,clients_total,rate_share_present,in_mean,in_p50,in_p90,in_p99,out_mean,out_p50,out_p90,"
        "out_p99\na,1,1,1,165,50,463,1493,29,5,80,216\n"
    )
    requests = servegen(tmp_path / "rates.csv", "a", mean_rps=2.0)
    first = sum(request.arrival_ms < 600_000.0 for request in requests)
    assert first == pytest.approx(600, rel=0.15)
    assert len(requests) - first == pytest.approx(1800, rel=0.1)
    # An hour in five minutes: twelve times as many requests in the same time, or as many in a twelfth of it.
    shorter = servegen(tmp_path / "rates.csv", "a", mean_rps=24.0, hour_s=300.0)
    assert len(shorter) == pytest.approx(2400, rel=0.1)
    assert sum(request.arrival_ms < 50_000.0 for request in shorter) == pytest.approx(600, rel=0.15)
    assert max(request.arrival_ms for request in shorter) < 100_000.0
    prompts = sorted(request.prompt_tokens for request in requests)
    assert prompts[len(prompts) // 2] == pytest.approx(50, rel=0.15)
    assert prompts[int(0.9 * len(prompts))] == pytest.approx(463, rel=0.25)


def test_an_oracle_that_was_kept_is_taken_for_the_same_load_and_setting_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--policy", "static_mean", "--json", "--oracle", str(tmp_path / "oracle.json")]
    assert antiphon(words, {}) == 0
    first = json.loads(capsys.readouterr().out)
    written = (tmp_path / "oracle.json").read_bytes()

    def never(*_: object, **__: object) -> None:
        raise AssertionError("looked for again")

    with monkeypatch.context() as patch:
        patch.setattr(command, "find_reference", never)
        assert antiphon(words, {}) == 0
    again = json.loads(capsys.readouterr().out)
    for one in (first, again):
        for figures in (one["oracle"], *one["policies"].values()):
            figures.pop("took_s")
    assert again == first

    assert antiphon([*words, "--drain", "5s"], {}) == 0
    assert (tmp_path / "oracle.json").read_bytes() != written
    (tmp_path / "oracle.json").write_text("{}")
    assert antiphon(words, {}) == 2
    assert "holds no oracle" in capsys.readouterr().err


def test_loads_are_made_so_large_that_their_work_keeps_so_many_workers_busy(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--load", "step"), ("--trace", str(CODE))):
        parser = argparse.ArgumentParser()
        add_load_options(parser)
        given = parser.parse_args([*words, "--busy-workers", "2", "--sla", "ttft=500ms,tpot=40ms"])
        setting = read_setting(given)
        load, _ = read_requests(given, setting)
        assert sum(mean_work_ms(load.calls, setting)) / load.span_ms == pytest.approx(2.0, rel=0.15)
