"""The loop closed: a constant load does not make the sizes swing, and a step is followed up and down again."""

from __future__ import annotations

import itertools

import pytest
from antiphon_policy.route_records import WorkerRole

from tests.policy.scaling.loop import pair, poisson, run


@pytest.mark.parametrize(("rps", "seed"), [(2.0, 0), (4.0, 1)])
def test_at_a_constant_load_at_most_one_reversal_in_ten_minutes(rps: float, seed: int) -> None:
    result = run(poisson(lambda _: rps, 1800.0, seed), pair(2, 2, ceiling=20), 1800.0, every_s=60.0)
    for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
        times = result.reversals(role)
        assert all(later - earlier >= 600_000.0 for earlier, later in itertools.pairwise(times))
    assert result.inside / result.requests >= 0.95


def test_a_step_is_followed_and_given_back() -> None:
    result = run(
        poisson(lambda second: 9.0 if 400 <= second < 700 else 1.0, 1500.0, 2), pair(1, 1), 1500.0, every_s=50.0
    )
    prefill = result.sizes(WorkerRole.PREFILL)
    assert max(prefill) >= 3
    assert prefill[-1] < max(prefill)
    # Two reversals: up and down again once.
    assert len(result.reversals(WorkerRole.PREFILL)) <= 2
