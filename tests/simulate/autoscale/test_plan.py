"""`antiphon simulate plan`: how many workers, and whether pools are worth having."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from antiphon.__main__ import run as antiphon
from antiphon_simulate.autoscale.calls import make_load
from antiphon_simulate.autoscale.goal import Goal
from antiphon_simulate.autoscale.plan import ScalePlan, plan
from antiphon_simulate.autoscale.records import Sizes

from tests.support.scaling import SETTING, TIMING, request

ROOT = Path(__file__).parents[3]
CODE = ROOT / "tests" / "data" / "azure2023_code_first100.csv"


def planned(rps: float, prompt_tokens: int, output_tokens: int, goal: Goal, seconds: float = 20.0) -> ScalePlan:
    requests = [request(at, at / rps, prompt_tokens, output_tokens) for at in range(int(rps * seconds))]
    setting = replace(SETTING, goal=goal)
    return plan(make_load("even", requests, TIMING, goal), requests, setting)


def test_pools_are_worth_it_where_prompts_would_stall_answers() -> None:
    # A mixed step of 256 prompt tokens takes 31 ms, of 8 that a token may take; a decode step takes 6.
    found = planned(8.0, 1000, 40, Goal(ttft_ms=600.0, tpot_ms=8.0))
    assert found.pools is not None
    assert found.is_worth_it
    assert "31 ms" in found.reason
    assert found.both is None or found.both.workers > found.pools.workers


def test_one_worker_that_does_both_is_enough_for_a_light_load() -> None:
    found = planned(1.0, 200, 10, Goal(ttft_ms=600.0, tpot_ms=100.0))
    assert found.both is not None
    assert found.pools is not None
    assert (found.both.workers, found.pools.workers) == (1, 2)
    assert not found.is_worth_it
    assert "pools are of whole workers" in found.reason
    assert found.whole == Sizes(1, 1)


def test_a_goal_that_nothing_keeps_is_said_to_be_one() -> None:
    # 120 prompts at once, with time for a few.
    requests = [request(at, 1.0, 1000, 20) for at in range(120)]
    goal = Goal(ttft_ms=150.0, tpot_ms=20.0)
    setting = replace(SETTING, goal=goal, site=replace(SETTING.site, most=Sizes(2, 1)))
    found = plan(make_load("at once", requests, TIMING, goal), requests, setting)
    assert (found.pools, found.both) == (None, None)
    assert "no workers that are allowed keep this goal" in found.reason


def test_the_plan_is_told_as_a_table_and_as_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "plan", "--trace", str(CODE), "--limit", "60", "--sla", "ttft=1s,perThousand=60ms,tpot=40ms"]
    assert antiphon(words, {}) == 0
    out, _ = capsys.readouterr()
    assert "workers that do both" in out
    assert "worth it here: " in out
    assert antiphon([*words, "--json"], {}) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["whole"]["prefill"] >= 1
    assert told["busiest"]["requests"] <= 60
    assert isinstance(told["disaggregation_is_worth_it"], bool)
