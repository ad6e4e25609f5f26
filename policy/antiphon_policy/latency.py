"""The latency model: milliseconds of an engine step and of a transfer, from what workers measured.

    step_ms = base + per_new_token * new_tokens + per_token_context * sum(new_tokens * context)
            + per_sequence * sequences + per_kv_token * kv_tokens

All coefficients are >= 0. Routing, admission and scaling all price their choices with it, so there are no weights for
a person to tune. `StepModelFit` learns the coefficients of one worker from its own steps.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK_TOKENS = 512
"""Prompt tokens in one step where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """Coefficients in milliseconds per unit (see the module's formula)."""

    base_ms: float = 2.0
    per_new_token_ms: float = 0.5
    per_token_context_ms: float = 0.0
    per_sequence_ms: float = 0.1
    per_kv_token_ms: float = 0.0001

    def step_ms(self, *, new_tokens: int, token_context: int, sequences: int, kv_tokens: int) -> float:
        """Predicted duration of one step."""
        return (
            self.base_ms
            + self.per_new_token_ms * new_tokens
            + self.per_token_context_ms * token_context
            + self.per_sequence_ms * sequences
            + self.per_kv_token_ms * kv_tokens
        )

    def prefill_ms(self, *, new_tokens: int, cached_tokens: int = 0, chunk_tokens: int = CHUNK_TOKENS) -> float:
        """Predicted time to compute `new_tokens` prompt tokens after `cached_tokens`, alone, in chunks.

        The sum of `step_ms` over the chunks, in closed form. With the default coefficients, 1,000 tokens after 24:
        two chunks of base 2 and sequence 0.1 each, 1,000 tokens of 0.5, and contexts of 536 and 1,024 at 0.0001:
        4 + 0.2 + 500 + 0.156 = 504.356 ms.
        """
        if new_tokens <= 0:
            return 0.0
        full, rest = divmod(new_tokens, chunk_tokens)
        # Contexts at the ends of the full chunks: cached + chunk, cached + 2 chunk, ...
        full_contexts = full * cached_tokens + chunk_tokens * full * (full + 1) // 2
        last_context = cached_tokens + new_tokens if rest else 0
        steps = full + (1 if rest else 0)
        return (
            steps * (self.base_ms + self.per_sequence_ms)
            + self.per_new_token_ms * new_tokens
            + self.per_token_context_ms * (chunk_tokens * full_contexts + rest * last_context)
            + self.per_kv_token_ms * (full_contexts + last_context)
        )


def transfer_ms(num_bytes: int, *, gigabytes_per_s: float, latency_ms: float = 0.2) -> float:
    """Predicted time to move `num_bytes` over a link of that measured speed."""
    if gigabytes_per_s <= 0.0:
        return latency_ms
    return latency_ms + num_bytes / (gigabytes_per_s * 1e6)


@dataclass(frozen=True, slots=True)
class InputRange:
    """The inputs that a model was fitted on: (least, most) of each. Beyond them it extrapolates."""

    new_tokens: tuple[int, int]
    token_context: tuple[int, int]
    sequences: tuple[int, int]
    kv_tokens: tuple[int, int]

    def covers(self, *, new_tokens: int, token_context: int, sequences: int, kv_tokens: int) -> bool:
        asked = (new_tokens, token_context, sequences, kv_tokens)
        seen = (self.new_tokens, self.token_context, self.sequences, self.kv_tokens)
        return all(least <= value <= most for value, (least, most) in zip(asked, seen, strict=True))


_UNITS = (1.0, 128.0, 128.0 * 512.0, 8.0, 8.0 * 512.0)
"""Typical magnitudes of the five inputs: the solver works in these units, where all coefficients are comparable."""

_BIN_SAMPLES = 64
"""So many of its last samples count in each bin."""

_KEPT_SAMPLES = 16.0
"""A bin that gets no more samples fades to the weight of so many, and stays there."""

_IDLE_FADE = 0.97
"""What is left of a bin above that, at each solving."""

_PRIOR_SAMPLES = 0.5
"""The prior weighs as much as so many samples at typical inputs (in units, see `_UNITS`)."""

_SOLVE_EVERY = 16
"""The coefficients are solved for anew after so many samples, and with each of the first so many."""

_SWEEPS = 12
_ERROR_SAMPLES = 64.0


class _Bin:
    """Normal equations of the steps of similar size: upper triangle of the Gram matrix by rows, and the moments."""

    __slots__ = ("gram", "moments", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        """In samples."""
        self.gram = [0.0] * 15
        self.moments = [0.0] * 5

    def fade(self, share: float) -> None:
        self.weight *= share
        self.gram = [value * share for value in self.gram]
        self.moments = [value * share for value in self.moments]


class StepModelFit:
    """Learns one worker's step model: non-negative least squares over its latest steps, shrunk towards a prior.

    Of the prior only the proportions count; its scale is that of the steps seen. So on a machine that is a hundred
    times faster than the prior says, what was not measured yet is taken to be faster too.

    Errors count relative to the step's duration, so short decode steps matter as much as long prompt chunks, and one
    stalled step cannot count for more than one whole error. Samples are binned by the power of two of `new_tokens`
    and a bin that gets no samples keeps some weight: an hour of pure decoding does not make the worker forget what a
    prompt costs, while a worker that became slower is soon seen as such in all bins: by half and more of the change
    from one kind of step alone, and wholly once the other kinds have run again.

    `observe` costs a few microseconds; the five coefficients are solved for by projected coordinate descent, from the
    last solution on, once in `_SOLVE_EVERY` samples. Used from one thread.
    """

    def __init__(self, prior: StepModel | None = None) -> None:
        self._prior = prior or StepModel()
        self._model = self._prior
        self._values: list[float] = []
        self._bins: dict[int, _Bin] = {}
        self._mean_ms = 0.0
        self._mean_prior_ms = 0.0
        self._unsolved = 0
        self._predictions = 0
        self._range: list[list[int]] = []
        self.samples = 0
        self.relative_error = 0.0
        """Recent mean of |predicted - measured| / measured, each predicted before it was learnt from; 0 before any."""

    def observe(
        self, duration_ms: float, *, new_tokens: int, token_context: int, sequences: int, kv_tokens: int
    ) -> None:
        """One step and what it took. Durations that are not positive and finite say nothing and are left out."""
        if not 0.0 < duration_ms < float("inf"):
            return
        inputs = (new_tokens, token_context, sequences, kv_tokens)
        predicted_ms = self._model.step_ms(
            new_tokens=new_tokens, token_context=token_context, sequences=sequences, kv_tokens=kv_tokens
        )
        self._note(duration_ms, predicted_ms, inputs)
        row = (
            1.0,
            new_tokens / _UNITS[1],
            token_context / _UNITS[2],
            sequences / _UNITS[3],
            kv_tokens / _UNITS[4],
        )
        weight = 1.0 / (duration_ms * duration_ms)
        fade = 1.0 - 1.0 / _BIN_SAMPLES
        found = self._bins.get(new_tokens.bit_length())
        if found is None:
            found = self._bins[new_tokens.bit_length()] = _Bin()
        found.weight = fade * found.weight + 1.0
        gram, moments = found.gram, found.moments
        at = 0
        for left in range(5):
            weighted = weight * row[left]
            moments[left] = fade * moments[left] + weighted * duration_ms
            for right in range(left, 5):
                gram[at] = fade * gram[at] + weighted * row[right]
                at += 1
        self._unsolved += 1
        # The first samples tell most.
        if self._unsolved >= _SOLVE_EVERY or self.samples <= _SOLVE_EVERY:
            self._solve()

    def model(self) -> StepModel:
        """The best fit so far; the prior before the first sample."""
        return self._model

    def forget_errors(self) -> None:
        """Count errors from now on: those so far were the prior's, which nothing will be predicted by any more."""
        self._predictions = 0
        self.relative_error = 0.0

    @property
    def observed(self) -> InputRange | None:
        """Range of the inputs so far; None before the first sample."""
        if not self._range:
            return None
        new_tokens, token_context, sequences, kv_tokens = ((least, most) for least, most in self._range)
        return InputRange(new_tokens, token_context, sequences, kv_tokens)

    def _note(self, duration_ms: float, predicted_ms: float, inputs: tuple[int, int, int, int]) -> None:
        self.samples += 1
        self._predictions += 1
        error = abs(predicted_ms - duration_ms) / duration_ms
        self.relative_error += (error - self.relative_error) / min(float(self._predictions), _ERROR_SAMPLES)
        share = 1.0 / min(float(self.samples), _ERROR_SAMPLES)
        self._mean_ms += share * (duration_ms - self._mean_ms)
        new_tokens, token_context, sequences, kv_tokens = inputs
        prior_ms = self._prior.step_ms(
            new_tokens=new_tokens, token_context=token_context, sequences=sequences, kv_tokens=kv_tokens
        )
        self._mean_prior_ms += share * (prior_ms - self._mean_prior_ms)
        if not self._range:
            self._range = [[value, value] for value in inputs]
        for value, bounds in zip(inputs, self._range, strict=True):
            if value < bounds[0]:
                bounds[0] = value
            elif value > bounds[1]:
                bounds[1] = value

    def _solve(self) -> None:
        self._unsolved = 0
        gram = [[0.0] * 5 for _ in range(5)]
        moments = [0.0] * 5
        for found in self._bins.values():
            if found.weight > _KEPT_SAMPLES:
                found.fade(_IDLE_FADE)
            at = 0
            for left in range(5):
                moments[left] += found.moments[left]
                for right in range(left, 5):
                    gram[left][right] += found.gram[at]
                    at += 1
        scale = self._mean_ms / self._mean_prior_ms if self._mean_prior_ms > 0.0 else 1.0
        prior = [value * scale for value in _in_units(self._prior)]
        for left in range(5):
            # In units of typical inputs a coefficient is about a step long. One that is longer than the steps of late
            # (a prompt's, while all decode) counts relative to itself, or it would outweigh the prompts that were seen.
            typical_ms = max(self._mean_ms, prior[left])
            ridge = _PRIOR_SAMPLES / (typical_ms * typical_ms)
            moments[left] += ridge * prior[left]
            gram[left][left] += ridge
            for right in range(left):
                gram[left][right] = gram[right][left]
        values = self._values if self.samples > _SOLVE_EVERY else prior
        self._values = values
        for _ in range(_SWEEPS):
            for at, line in enumerate(gram):
                rest = (
                    line[0] * values[0]
                    + line[1] * values[1]
                    + line[2] * values[2]
                    + line[3] * values[3]
                    + line[4] * values[4]
                    - line[at] * values[at]
                )
                values[at] = max(0.0, (moments[at] - rest) / line[at])
        self._model = StepModel(*(value / unit for value, unit in zip(values, _UNITS, strict=True)))


def _in_units(model: StepModel) -> tuple[float, float, float, float, float]:
    return (
        model.base_ms * _UNITS[0],
        model.per_new_token_ms * _UNITS[1],
        model.per_token_context_ms * _UNITS[2],
        model.per_sequence_ms * _UNITS[3],
        model.per_kv_token_ms * _UNITS[4],
    )
