"""How likely a prompt's own tokens are: log-probabilities, ranks and the best alternatives, from rows of logits.

Of the logits as the model has them: no temperature, no penalty, no mask has to do with a prompt. Rows are taken one
by one, so that what is made beside the logits stays small. `tokens_of` is what an executor asks where a step's rows
may be of either kind; a step that only samples goes straight to the sampler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from antiphon_engine.executor import RowSpec, SampledToken, SampleSpec, ScoreSpec
from antiphon_engine.interface import TokenLogprob

LOWEST_LOGPROB = -9999.0
"""Stands for -inf in log-probabilities, which JSON cannot say (as OpenAI and vLLM do)."""

Row = NDArray[np.float32]


class TokenSampler(Protocol):
    """Chooses tokens: `sampler.Sampler`."""

    def sample(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[SampledToken]:
        """logits [rows, vocabulary], one spec a row."""
        ...


def tokens_of(sampler: TokenSampler, logits: torch.Tensor, specs: Sequence[RowSpec]) -> list[SampledToken]:
    """logits [rows, vocabulary], one spec a row; one token a row."""
    scores = [(row, spec) for row, spec in enumerate(specs) if isinstance(spec, ScoreSpec)]
    sampled = [(row, spec) for row, spec in enumerate(specs) if isinstance(spec, SampleSpec)]
    tokens: dict[int, SampledToken] = {}
    for row, scored in scores:
        found = _score(logits[row].detach().float().cpu().numpy(), scored)
        tokens[row] = SampledToken(found.token_id, found)
    if sampled:
        chosen = sampler.sample(logits[[row for row, _ in sampled]], [spec for _, spec in sampled])
        tokens.update(zip((row for row, _ in sampled), chosen, strict=True))
    return [tokens[row] for row in range(len(specs))]


def _score(row: Row, spec: ScoreSpec) -> TokenLogprob:
    best = row.max()
    if np.isnan(best):
        row = np.nan_to_num(row, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        best = row.max()
    value = row[spec.target]
    # Equal ones by lowest id, as everywhere.
    rank = 1 + int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[: spec.target] == value))
    if not np.isfinite(best):
        return TokenLogprob(spec.target, LOWEST_LOGPROB, rank=rank)
    normaliser = float(best) + math.log(float(np.exp(row - best).sum(dtype=np.float64)))
    return TokenLogprob(
        token_id=spec.target,
        logprob=_finite(float(value) - normaliser),
        top=tuple((int(token_id), _finite(float(row[token_id]) - normaliser)) for token_id in best_ids(row, spec.top)),
        rank=rank,
    )


def best_ids(row: Row, count: int) -> NDArray[np.int64]:
    """The `count` best ids, best first, equal ones by lowest id."""
    if count >= len(row):
        chosen: NDArray[np.int64] = np.arange(len(row))
    elif count < 1:
        return np.empty(0, dtype=np.int64)
    else:
        threshold = np.partition(row, len(row) - count)[len(row) - count]
        chosen = np.flatnonzero(row >= threshold)
    order = np.argsort(-row[chosen], kind="stable")
    return chosen[order][:count]


def _finite(logprob: float) -> float:
    """Not a number where the logits were none."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
