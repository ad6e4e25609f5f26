"""Fits the step model to what this worker's own steps took.

Recursive least squares in normal-equation form: old samples fade, a prior (a few samples' worth of weight) holds the
coefficients that the data says nothing about, and none may be negative. With five unknowns a coordinate descent that
clips at zero finds the minimum in microseconds, so it runs when somebody asks and not at every step.
"""

from __future__ import annotations

from antiphon_engine.interface import StepSample
from antiphon_policy.latency import StepModel

FADE = 0.998
"""Weight of a sample after each further one: the last few hundred steps count."""

PRIOR_SAMPLES = 4.0
SWEEPS = 60
MAX_DURATION_MS = 60_000.0
"""A step that took longer was stopped from outside (a debugger, SIGSTOP); it says nothing."""

_TYPICAL = (1.0, 128.0, 128.0 * 512.0, 8.0, 8.0 * 512.0)
"""Magnitudes of the five inputs, so that the prior weighs alike on each."""


class StepModelFit:
    """The step model of one worker, learnt from `add`ed samples."""

    def __init__(self, prior: StepModel) -> None:
        self._prior = _coefficients(prior)
        size = len(_TYPICAL)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._samples = 0
        self._fitted_samples = 0
        self._model = prior

    def add(self, sample: StepSample) -> None:
        if not 0.0 < sample.duration_ms < MAX_DURATION_MS:
            return
        inputs = (
            1.0,
            sample.new_tokens / _TYPICAL[1],
            sample.token_context / _TYPICAL[2],
            sample.sequences / _TYPICAL[3],
            sample.kv_tokens / _TYPICAL[4],
        )
        # Weighted by 1/duration, so that errors count relative to the step: short steps matter as much as long ones.
        weight = 1.0 / (sample.duration_ms * sample.duration_ms)
        for row, left in enumerate(inputs):
            gram = self._gram[row]
            for column, right in enumerate(inputs):
                gram[column] = FADE * gram[column] + weight * left * right
            self._moment[row] = FADE * self._moment[row] + weight * left * sample.duration_ms
        self._samples += 1

    @property
    def model(self) -> StepModel:
        """The best fit so far."""
        if self._samples != self._fitted_samples:
            self._fitted_samples = self._samples
            self._model = self._solve()
        return self._model

    def _solve(self) -> StepModel:
        prior = [coefficient * typical for coefficient, typical in zip(self._prior, _TYPICAL, strict=True)]
        scale = sum(prior) or 1.0
        ridge = PRIOR_SAMPLES / (scale * scale)
        values = list(prior)
        for _ in range(SWEEPS):
            for row, gram in enumerate(self._gram):
                others = sum(gram[column] * values[column] for column in range(len(values)) if column != row)
                values[row] = max(0.0, (self._moment[row] + ridge * prior[row] - others) / (gram[row] + ridge))
        base, new, context, sequences, kv = (value / typical for value, typical in zip(values, _TYPICAL, strict=True))
        return StepModel(
            base_ms=base,
            per_new_token_ms=new,
            per_token_context_ms=context,
            per_sequence_ms=sequences,
            per_kv_token_ms=kv,
        )


def _coefficients(model: StepModel) -> tuple[float, ...]:
    return (
        model.base_ms,
        model.per_new_token_ms,
        model.per_token_context_ms,
        model.per_sequence_ms,
        model.per_kv_token_ms,
    )
