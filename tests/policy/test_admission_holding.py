"""When a request is kept back from a worker, and how long a client is sent away."""

from __future__ import annotations

import pytest
from antiphon_policy.holding import (
    LEAST_HORIZON_MS,
    MOST_RETRY_S,
    hold_ms,
    horizon_ms,
    prompt_tokens_per_ms,
    retry_after_s,
)
from antiphon_policy.latency import StepModel
from hypothesis import given
from hypothesis import strategies as st

SLOW = StepModel()
FAST = StepModel(base_ms=1.0, per_new_token_ms=0.005, per_sequence_ms=0.0, per_kv_token_ms=0.0)


def test_the_worked_example() -> None:
    horizon = horizon_ms(SLOW, round_trip_ms=2.0, report_ms=50.0)
    assert horizon == pytest.approx(260.1512)
    assert hold_ms(300.0, horizon) == pytest.approx(39.8488)
    assert hold_ms(260.0, horizon) == 0.0


def test_a_fast_worker_is_given_at_least_what_bridges_a_hiccup_of_the_gateway() -> None:
    assert horizon_ms(FAST) == LEAST_HORIZON_MS


def test_a_worker_that_reports_seldom_is_given_work_until_its_next_report() -> None:
    assert horizon_ms(FAST, report_ms=500.0, round_trip_ms=3.0) == 503.0


def test_the_fleets_rate_is_the_sum_of_its_workers() -> None:
    assert prompt_tokens_per_ms([SLOW, SLOW]) == pytest.approx(2 * 512 / 258.1512)
    assert prompt_tokens_per_ms([]) == 0.0


def test_retry_after_is_when_the_tokens_have_been_computed() -> None:
    assert retry_after_s(30_000, 2.0, 0.0) == 15
    assert retry_after_s(30_000, 2.0, 0.99) == 23
    assert retry_after_s(30_000, 0.0, 0.0) == 1


@given(st.floats(0, 1e12), st.floats(0, 1e9), st.floats(0, 0.999999))
def test_retry_after_is_bounded_and_not_the_same_for_all(tokens: float, rate: float, draw: float) -> None:
    assert 1 <= retry_after_s(tokens, rate, draw) <= MOST_RETRY_S * 1.5
    assert retry_after_s(tokens, rate, 0.0) <= retry_after_s(tokens, rate, draw)
