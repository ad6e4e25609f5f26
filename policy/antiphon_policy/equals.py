"""What workers of equal hardware know of each other's speed.

A worker that has measured little yet is priced by what its equals have measured; one that has measured enough is priced
by its own fit alone, so one slow machine among equals is soon known as slow, and makes nobody else look slow.

    share = min(1, own samples / TRUSTED_SAMPLES)
    model = share * own fit + (1 - share) * pooled(fits of its equals)

`pooled` is one of the fits, not a mean of coefficients: fits that predict the same may explain it by different
coefficients, and a mix of those predicts neither. It is the fit whose predictions for `TYPICAL_STEPS` are nearest to
the weighted medians of all predictions, so an outlier has no say as long as the others outweigh it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from antiphon_policy.latency import StepModel

TRUSTED_SAMPLES = 32
"""A fit over so many steps stands for itself. A worker has them after a second of decoding."""

_NO_TIME_MS = 1e-6


@dataclass(frozen=True, slots=True)
class TypicalStep:
    """A step that fits are compared by; the fields are those of `StepModel.step_ms`."""

    new_tokens: int
    token_context: int
    sequences: int
    kv_tokens: int

    def ms(self, model: StepModel) -> float:
        return model.step_ms(
            new_tokens=self.new_tokens,
            token_context=self.token_context,
            sequences=self.sequences,
            kv_tokens=self.kv_tokens,
        )


def _prompt(tokens: int, context: int) -> TypicalStep:
    return TypicalStep(tokens, tokens * (context + tokens), 1, context + tokens)


def _decodes(sequences: int, context: int) -> TypicalStep:
    return TypicalStep(sequences, sequences * context, sequences, sequences * context)


TYPICAL_STEPS = (_prompt(64, 0), _prompt(512, 0), _prompt(512, 3584), _decodes(1, 512), _decodes(16, 1024))


@dataclass(frozen=True, slots=True)
class Fitted:
    """A worker's own step model and how much it rests on."""

    model: StepModel
    samples: int = 0
    relative_error: float = 0.0
    """Recent mean of |predicted - measured| / measured."""

    @property
    def is_trusted(self) -> bool:
        """It needs no help of its equals."""
        return self.samples >= TRUSTED_SAMPLES


def pooled(fits: Iterable[tuple[StepModel, int]]) -> StepModel | None:
    """The fit that stands best for all, each given with its samples; None if nobody has any.

    More than `TRUSTED_SAMPLES` weigh no more. Of equally good ones the first that has most samples.
    """
    known = [(model, min(samples, TRUSTED_SAMPLES)) for model, samples in fits if samples > 0]
    if len(known) < 2:
        return known[0][0] if known else None
    logs = [[math.log(max(step.ms(model), _NO_TIME_MS)) for step in TYPICAL_STEPS] for model, _ in known]
    weights = [weight for _, weight in known]
    medians = [_weighted_median(column, weights) for column in zip(*logs, strict=True)]
    off = [sum(abs(mine - middle) for mine, middle in zip(row, medians, strict=True)) for row in logs]
    best = min(range(len(known)), key=lambda at: (off[at], -weights[at]))
    return known[best][0]


def shared(own: Fitted, equals: StepModel | None) -> StepModel:
    """What to price a worker by: its own fit, helped out by that of its equals (`pooled`) while it has few samples.

    With 8 samples of 32, one quarter is its own: a base of 8 ms beside 4 ms of its equals gives 5 ms.
    """
    if own.is_trusted or equals is None:
        return own.model
    share = own.samples / TRUSTED_SAMPLES
    mine, theirs = own.model, equals
    return StepModel(
        base_ms=_between(mine.base_ms, theirs.base_ms, share),
        per_new_token_ms=_between(mine.per_new_token_ms, theirs.per_new_token_ms, share),
        per_token_context_ms=_between(mine.per_token_context_ms, theirs.per_token_context_ms, share),
        per_sequence_ms=_between(mine.per_sequence_ms, theirs.per_sequence_ms, share),
        per_kv_token_ms=_between(mine.per_kv_token_ms, theirs.per_kv_token_ms, share),
    )


def _between(mine: float, theirs: float, share: float) -> float:
    return share * mine + (1.0 - share) * theirs


def _weighted_median(values: Sequence[float], weights: Sequence[int]) -> float:
    """The least value that, with all below it, has at least half of the weight."""
    half = sum(weights) / 2
    reached = 0
    for value, weight in sorted(zip(values, weights, strict=True)):
        reached += weight
        if reached >= half:
            return value
    raise ValueError("there is no median of nothing")
