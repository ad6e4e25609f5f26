"""The latency model, and what is learnt from steps."""

from __future__ import annotations

import math
import random

import pytest
from antiphon_policy.latency import StepModel, StepModelFit, transfer_ms
from hypothesis import given
from hypothesis import strategies as st

COEFFICIENT = st.floats(min_value=0.0, max_value=10.0)
MODELS = st.builds(StepModel, COEFFICIENT, COEFFICIENT, COEFFICIENT, COEFFICIENT, COEFFICIENT)
TRUE = StepModel(
    base_ms=5.0,
    per_new_token_ms=0.02,
    per_token_context_ms=2e-6,
    per_sequence_ms=0.05,
    per_kv_token_ms=2e-5,
)


def prefill_by_steps(model: StepModel, new_tokens: int, cached_tokens: int, chunk_tokens: int) -> float:
    total, done = 0.0, 0
    while done < new_tokens:
        count = min(chunk_tokens, new_tokens - done)
        context = cached_tokens + done + count
        total += model.step_ms(new_tokens=count, token_context=count * context, sequences=1, kv_tokens=context)
        done += count
    return total


@given(MODELS, st.integers(0, 3000), st.integers(0, 5000), st.integers(1, 700))
def test_the_closed_form_is_the_sum_of_the_steps(model: StepModel, new: int, cached: int, chunk: int) -> None:
    found = model.prefill_ms(new_tokens=new, cached_tokens=cached, chunk_tokens=chunk)
    assert math.isclose(found, prefill_by_steps(model, new, cached, chunk), rel_tol=1e-9)


def test_the_worked_example() -> None:
    assert StepModel().prefill_ms(new_tokens=1000, cached_tokens=24) == pytest.approx(504.356)


def test_transfer() -> None:
    assert transfer_ms(8_000_000, gigabytes_per_s=2.0) == pytest.approx(4.2)
    assert transfer_ms(8_000_000, gigabytes_per_s=0.0) == pytest.approx(0.2)


def steps(source: random.Random, count: int, *, prompts: float = 0.3) -> list[dict[str, int]]:
    """Inputs of mixed steps: decodes, and now and then a chunk of a prompt."""
    found = []
    for _ in range(count):
        sequences = source.randrange(1, 33)
        contexts = [source.randrange(64, 4000) for _ in range(sequences)]
        chunk = source.randrange(16, 512) if source.random() < prompts else 0
        token_context = sum(contexts) + chunk * 2000
        found.append(
            {
                "new_tokens": sequences + chunk,
                "token_context": token_context,
                "sequences": sequences + bool(chunk),
                "kv_tokens": sum(contexts) + (2000 if chunk else 0),
            }
        )
    return found


def learn(fit: StepModelFit, true: StepModel, inputs: list[dict[str, int]], noise: random.Random) -> None:
    for step in inputs:
        fit.observe(true.step_ms(**step) * noise.lognormvariate(0.0, 0.03), **step)


def close(fit: StepModelFit, true: StepModel, inputs: list[dict[str, int]]) -> bool:
    """Predictions within 4 % on average, none off by more than 20 %."""
    model = fit.model()
    errors = [abs(model.step_ms(**step) / true.step_ms(**step) - 1) for step in inputs]
    return sum(errors) / len(errors) < 0.04 and max(errors) < 0.2


@pytest.mark.parametrize("factor", [0.01, 0.3, 1.0, 20.0, 1000.0])
def test_it_learns_the_truth_from_any_prior(factor: float) -> None:
    prior = StepModel(*(getattr(TRUE, name) * factor for name in StepModel.__slots__))
    fit = StepModelFit(prior)
    assert fit.model() == prior
    source = random.Random(11)
    learn(fit, TRUE, steps(source, 1500), source)
    assert close(fit, TRUE, steps(source, 200))
    assert fit.relative_error < 0.06
    assert all(getattr(fit.model(), name) >= 0 for name in StepModel.__slots__)


def test_decoding_for_long_does_not_forget_what_a_prompt_costs() -> None:
    source = random.Random(12)
    fit = StepModelFit()
    learn(fit, TRUE, steps(source, 800), source)
    prompts = [step for step in steps(source, 300, prompts=1.0) if step["new_tokens"] > 100]
    assert close(fit, TRUE, prompts)
    learn(fit, TRUE, steps(source, 5000, prompts=0.0), source)
    assert close(fit, TRUE, prompts)


def test_it_follows_a_change() -> None:
    source = random.Random(13)
    fit = StepModelFit()
    learn(fit, TRUE, steps(source, 2000), source)
    slower = StepModel(*(getattr(TRUE, name) * 2 for name in StepModel.__slots__))
    learn(fit, slower, steps(source, 2000), source)
    assert close(fit, slower, steps(source, 200))


def test_a_stalled_step_changes_little() -> None:
    source = random.Random(14)
    fit = StepModelFit()
    learn(fit, TRUE, steps(source, 1000), source)
    fit.observe(60_000.0, **steps(source, 1)[0])
    learn(fit, TRUE, steps(source, 20), source)
    assert close(fit, TRUE, steps(source, 200))


def test_what_was_never_measured_scales_with_what_was() -> None:
    """Only decode steps were seen, a tenth as long as the prior says: prompts are taken to be ten times faster too."""
    prior = StepModel(*(getattr(TRUE, name) * 10 for name in StepModel.__slots__))
    fit = StepModelFit(prior)
    for _ in range(300):
        step = {"new_tokens": 1, "token_context": 500, "sequences": 1, "kv_tokens": 500}
        fit.observe(TRUE.step_ms(**step), **step)
    assert fit.model().per_new_token_ms == pytest.approx(TRUE.per_new_token_ms, rel=0.1)


def test_only_one_kind_of_step_keeps_the_prior_for_the_rest() -> None:
    """Steps that are all alike say nothing of the single coefficients; those stay near the prior."""
    fit = StepModelFit(TRUE)
    for _ in range(300):
        step = {"new_tokens": 1, "token_context": 500, "sequences": 1, "kv_tokens": 500}
        fit.observe(TRUE.step_ms(**step), **step)
    assert fit.model().per_new_token_ms == pytest.approx(TRUE.per_new_token_ms, rel=0.1)


def test_nonsense_is_left_out() -> None:
    """ai-dynamo/dynamo#6985, #14251: no traffic must not turn into NaN."""
    fit = StepModelFit()
    for duration in (0.0, -1.0, math.nan, math.inf):
        fit.observe(duration, new_tokens=1, token_context=1, sequences=1, kv_tokens=1)
    assert fit.samples == 0
    assert fit.observed is None
    assert fit.model() == StepModel()
    fit.observe(3.0, new_tokens=0, token_context=0, sequences=0, kv_tokens=0)
    assert all(math.isfinite(getattr(fit.model(), name)) for name in StepModel.__slots__)


def test_it_knows_its_range() -> None:
    fit = StepModelFit()
    fit.observe(3.0, new_tokens=4, token_context=40, sequences=4, kv_tokens=40)
    fit.observe(3.0, new_tokens=9, token_context=10, sequences=2, kv_tokens=60)
    seen = fit.observed
    assert seen is not None
    assert (seen.new_tokens, seen.token_context) == ((4, 9), (10, 40))
    assert seen.covers(new_tokens=5, token_context=20, sequences=3, kv_tokens=50)
    assert not seen.covers(new_tokens=10, token_context=20, sequences=3, kv_tokens=50)
