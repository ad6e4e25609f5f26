"""What the fit of a step model promises: never negative, bounded, never deaf, and it says where it only guesses."""

from __future__ import annotations

import math
import random

import pytest
from antiphon_policy.latency import StepModel, StepModelFit
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = StepModel.__slots__
TRUE = StepModel(
    base_ms=4.0, per_new_token_ms=0.3, per_token_context_ms=2e-5, per_sequence_ms=0.2, per_kv_token_ms=5e-4
)
DECODE = {"new_tokens": 8, "token_context": 8 * 700, "sequences": 8, "kv_tokens": 8 * 700}
PROMPT = {"new_tokens": 512, "token_context": 512 * 512, "sequences": 1, "kv_tokens": 512}
SELF_MEASURED = [
    *((tokens, 0, 1) for tokens in (16, 64, 256, 512)),
    *((1, 512, 1), (1, 512, 4), (1, 512, 16), (64, 512, 1), (1, 64, 1)),
]
"""(new tokens, context, sequences): the steps that an engine times before its first request."""


def times(model: StepModel, factor: float) -> StepModel:
    return StepModel(*(getattr(model, name) * factor for name in NAMES))


def inputs(new: int, context: int, sequences: int) -> dict[str, int]:
    end = context + new
    return {
        "new_tokens": new * sequences,
        "token_context": sequences * new * end,
        "sequences": sequences,
        "kv_tokens": sequences * end,
    }


STEP = st.builds(inputs, st.integers(0, 4096), st.integers(0, 30_000), st.integers(0, 64))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(STEP, st.floats(min_value=1e-3, max_value=1e5)), min_size=1, max_size=40),
    st.floats(min_value=1e-6, max_value=1e3),
)
def test_coefficients_are_finite_and_never_negative_whatever_was_measured(
    samples: list[tuple[dict[str, int], float]], scale: float
) -> None:
    fit = StepModelFit(times(StepModel(), scale))
    for step, duration_ms in samples:
        fit.observe(duration_ms, **step)
        for name in NAMES:
            value = getattr(fit.model(), name)
            assert math.isfinite(value)
            assert value >= 0.0


def test_longer_steps_are_never_predicted_to_be_shorter() -> None:
    """Follows from coefficients >= 0, and is what routing relies on: noise here says that long prompts are quicker."""
    source = random.Random(5)
    fit = StepModelFit()
    for _ in range(200):
        step = inputs(source.randrange(16, 512), 0, 1)
        fit.observe(200.0 - step["new_tokens"] * 0.3 + source.random(), **step)
    lengths = [fit.model().prefill_ms(new_tokens=tokens) for tokens in range(1, 4000, 77)]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(("slowed", "within"), [(0.5, 0.05), (2.0, 0.08), (4.0, 0.3)])
def test_a_long_time_of_equal_steps_neither_makes_it_explode_nor_deaf(slowed: float, within: float) -> None:
    """In recursive least squares with forgetting, equal steps let the covariance grow without bound, so the next
    different step throws the fit far off; a filter without forgetting hears nothing new instead. What it
    remembers of other steps holds back a large change a little, until such steps are seen again."""
    fit = StepModelFit()
    for new, context, sequences in SELF_MEASURED:
        step = inputs(new, context, sequences)
        fit.observe(TRUE.step_ms(**step), **step)
    for _ in range(5_000):
        fit.observe(TRUE.step_ms(**DECODE), **DECODE)
    before = fit.model()
    assert before.step_ms(**DECODE) == pytest.approx(TRUE.step_ms(**DECODE), rel=0.01)
    assert before.step_ms(**PROMPT) == pytest.approx(TRUE.step_ms(**PROMPT), rel=0.25), "prompts are not forgotten"

    # One step that took three times as long moves it by little...
    fit.observe(3 * TRUE.step_ms(**PROMPT), **PROMPT)
    for _ in range(16):
        fit.observe(TRUE.step_ms(**DECODE), **DECODE)
    assert fit.model().step_ms(**DECODE) == pytest.approx(TRUE.step_ms(**DECODE), rel=0.1)
    assert fit.model().step_ms(**PROMPT) < 2 * TRUE.step_ms(**PROMPT)

    # ... and a machine that is another one from now on is soon known as that.
    other = times(TRUE, slowed)
    for _ in range(300):
        fit.observe(other.step_ms(**DECODE), **DECODE)
    assert fit.model().step_ms(**DECODE) == pytest.approx(other.step_ms(**DECODE), rel=within)


@pytest.mark.parametrize("factor", [0.001, 0.1, 1.0, 30.0])
def test_a_self_measurement_is_enough_to_price_the_first_requests(factor: float) -> None:
    """Machines that are up to a thousand times faster than the prior says, or much slower, measured with 5 % noise."""
    true = times(TRUE, factor)
    for seed in range(20):
        noise = random.Random(seed)
        fit = StepModelFit()
        for new, context, sequences in SELF_MEASURED:
            step = inputs(new, context, sequences)
            fit.observe(true.step_ms(**step) * noise.lognormvariate(0.0, 0.05), **step)
        model = fit.model()
        for new_tokens in (30, 300, 2000):
            expected = true.prefill_ms(new_tokens=new_tokens)
            assert model.prefill_ms(new_tokens=new_tokens) == pytest.approx(expected, rel=0.15), (seed, new_tokens)
        for sequences in (1, 8, 16):
            step = inputs(1, 600, sequences)
            assert model.step_ms(**step) == pytest.approx(true.step_ms(**step), rel=0.15), (seed, sequences)


def test_where_it_only_guesses_can_be_told() -> None:
    fit = StepModelFit()
    assert fit.observed is None
    for new, context, sequences in SELF_MEASURED:
        step = inputs(new, context, sequences)
        fit.observe(TRUE.step_ms(**step), **step)
    seen = fit.observed
    assert seen is not None
    assert seen.covers(**inputs(200, 100, 1))
    assert seen.covers(**inputs(1, 300, 8))
    assert not seen.covers(**inputs(2000, 0, 1)), "no prompt was so long"
    assert not seen.covers(**inputs(1, 100, 40)), "no batch was so large"
    assert not seen.covers(**inputs(1, 30_000, 16)), "no context was so long"


def test_the_error_is_that_of_predictions_made_before_the_step() -> None:
    fit = StepModelFit(TRUE)
    assert fit.relative_error == 0.0
    fit.observe(2 * TRUE.step_ms(**DECODE), **DECODE)
    assert fit.relative_error == pytest.approx(0.5)
    for _ in range(100):
        fit.observe(2 * TRUE.step_ms(**DECODE), **DECODE)
    assert fit.relative_error < 0.1
    for _ in range(64):
        fit.observe(4 * TRUE.step_ms(**DECODE), **DECODE)
    assert fit.relative_error > 0.1, "a machine that became slower shows"


def test_the_priors_errors_need_not_count() -> None:
    fit = StepModelFit(times(TRUE, 50))
    for new, context, sequences in SELF_MEASURED:
        step = inputs(new, context, sequences)
        fit.observe(TRUE.step_ms(**step), **step)
    assert fit.relative_error > 0.5
    fit.forget_errors()
    assert (fit.relative_error, fit.samples) == (0.0, len(SELF_MEASURED))
    fit.observe(TRUE.step_ms(**DECODE), **DECODE)
    assert fit.relative_error < 0.2
