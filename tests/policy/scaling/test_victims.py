"""Who goes when there are too many: whoever has least to lose."""

from __future__ import annotations

import pytest
from antiphon_policy.latency import StepModel
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import WorkerNews
from antiphon_policy.scaling.assembly import WorkerFigures
from antiphon_policy.scaling.victims import Candidate, first_to_go, loss_ms, losses

HALF_MS = WorkerFigures(StepModel(base_ms=0.0, per_new_token_ms=0.5, per_sequence_ms=0.0, per_kv_token_ms=0.0))


def told(name: str, **fields: int) -> WorkerNews:
    return WorkerNews(name, WorkerRole.DECODE, **fields)  # type: ignore[arg-type]


def order(candidates: list[Candidate], workers: list[WorkerNews]) -> list[str]:
    return [one.worker_id for one in first_to_go(candidates, losses(workers, HALF_MS))]


def test_a_loss_is_what_would_have_to_be_computed_again() -> None:
    worker = told("w", running=4, kv_tokens=4000, waiting_tokens=500, hit_tokens=10_000)
    assert loss_ms(worker, HALF_MS) == pytest.approx(2000 + 250 + 5000)
    assert loss_ms(told("idle"), HALF_MS) == 0.0
    assert loss_ms(told("odd", running=-1, kv_tokens=-5, hit_tokens=-1), HALF_MS) == 0.0


def test_the_one_with_least_to_lose_goes_first() -> None:
    all_ready = [Candidate("full", True, 3), Candidate("cached", True, 2), Candidate("empty", True, 1)]
    workers = [told("full", running=8, kv_tokens=16_000), told("cached", hit_tokens=40_000), told("empty")]
    assert order(all_ready, workers) == ["empty", "full", "cached"]


def test_who_serves_nobody_goes_before_all_others() -> None:
    candidates = [Candidate("ready", True, 1), Candidate("starts", False, 2)]
    assert order(candidates, [told("starts", hit_tokens=10**6)]) == ["starts", "ready"]


def test_of_equals_the_newest_goes() -> None:
    candidates = [Candidate("a", True, 1), Candidate("c", True, 3), Candidate("b", True, 2)]
    assert order(candidates, []) == ["c", "b", "a"]
    assert order([Candidate("x", False, 1), Candidate("y", False, 2)], []) == ["y", "x"]
