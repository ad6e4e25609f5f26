"""What workers of equal hardware know of each other's speed."""

from __future__ import annotations

import random

import pytest
from antiphon_policy.equals import TRUSTED_SAMPLES, TYPICAL_STEPS, Fitted, pooled, shared
from antiphon_policy.latency import StepModel
from hypothesis import given
from hypothesis import strategies as st

TRUE = StepModel(
    base_ms=4.0, per_new_token_ms=0.3, per_token_context_ms=2e-5, per_sequence_ms=0.2, per_kv_token_ms=5e-4
)
NAMES = StepModel.__slots__


def noisy(source: random.Random, factor: float = 1.0, spread: float = 0.05) -> StepModel:
    return StepModel(*(getattr(TRUE, name) * factor * source.lognormvariate(0.0, spread) for name in NAMES))


def worst_ratio(model: StepModel) -> float:
    ratios = [step.ms(model) / step.ms(TRUE) for step in TYPICAL_STEPS]
    return max(max(ratios), 1 / min(ratios))


@pytest.mark.parametrize("factor", [0.1, 3.0, 50.0])
@pytest.mark.parametrize("outlier_samples", [1, 100_000])
def test_one_outlier_among_equals_has_no_say(factor: float, outlier_samples: int) -> None:
    source = random.Random(3)
    for at in range(4):
        fits = [(noisy(source), 200) for _ in range(3)]
        fits.insert(at, (noisy(source, factor), outlier_samples))
        model = pooled(fits)
        assert model is not None
        assert worst_ratio(model) < 1.2


def test_fits_that_predict_the_same_by_other_coefficients_are_not_mixed() -> None:
    """In steps of one sequence nothing tells `base` from `sequence`: a median of each could be 0 ms, or 8 ms."""
    by_base = StepModel(4.0, 0.1, 0.0, 0.0, 0.0)
    by_sequence = StepModel(0.0, 0.1, 0.0, 4.0, 0.0)
    model = pooled([(by_base, 50), (by_sequence, 50), (by_base, 50), (by_sequence, 60)])
    assert model in (by_base, by_sequence)


def test_who_measured_more_counts_for_more() -> None:
    fast, slow = TRUE, StepModel(*(getattr(TRUE, name) * 2 for name in NAMES))
    assert pooled([(fast, 20), (slow, 3)]) == fast
    assert pooled([(fast, 3), (slow, 20)]) == slow
    assert pooled([(fast, 1000), (slow, 2), (slow, 2)]) == fast


def test_nobody_knows_anything() -> None:
    assert pooled([]) is None
    assert pooled([(TRUE, 0)]) is None
    assert pooled([(StepModel(0, 0, 0, 0, 0), 5), (StepModel(0, 0, 0, 0, 0), 5)]) == StepModel(0, 0, 0, 0, 0)


@given(st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(1, 500)), min_size=1, max_size=12))
def test_what_is_pooled_is_one_of_the_fits_in_whatever_order(found: list[tuple[float, int]]) -> None:
    fits = [(StepModel(*(getattr(TRUE, name) * factor for name in NAMES)), samples) for factor, samples in found]
    model = pooled(fits)
    assert model in [fit for fit, _ in fits]
    other = pooled(reversed(fits))
    assert other is not None
    assert model is not None
    assert other.base_ms == model.base_ms or dict(fits)[other] == dict(fits)[model]


def test_a_new_worker_is_priced_by_its_equals_and_a_measured_one_by_itself() -> None:
    equals = TRUE
    own = StepModel(base_ms=8.0)
    assert shared(Fitted(own, 0), equals) == equals
    assert shared(Fitted(own, 8), equals).base_ms == pytest.approx(5.0), "the example of the docstring"
    assert shared(Fitted(own, TRUSTED_SAMPLES), equals) is own
    assert shared(Fitted(own, 3), None) is own
    bases = [shared(Fitted(own, samples), equals).base_ms for samples in range(TRUSTED_SAMPLES + 2)]
    assert bases == sorted(bases), "from one to the other without a jump"


def test_a_slow_machine_among_equals_is_soon_known_as_slow() -> None:
    slow = StepModel(*(getattr(TRUE, name) * 3 for name in NAMES))
    equals = pooled([(TRUE, 500), (TRUE, 400), (slow, TRUSTED_SAMPLES)])
    assert equals == TRUE
    assert shared(Fitted(slow, TRUSTED_SAMPLES), equals) is slow
    assert shared(Fitted(TRUE, 2), equals).base_ms == pytest.approx(TRUE.base_ms), "it makes nobody else look slow"
