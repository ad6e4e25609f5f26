"""How likely a prompt's own tokens are: log-probabilities, ranks and the best alternatives, from rows of logits.

Of the logits as the model has them: no temperature, no penalty, no mask has to do with a prompt. Rows are taken a few
at a time, so that what is made beside the logits stays small. `tokens_of` is what an executor asks where a step's rows
may be of either kind; a step that only samples goes straight to the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from antiphon_engine.executor import RowSpec, SampledToken, SampleSpec, ScoreSpec
from antiphon_engine.interface import TokenLogprob

LOWEST_LOGPROB = -9999.0
"""Stands for -inf in log-probabilities, which JSON cannot say (as OpenAI and vLLM do)."""
_ROWS_AT_ONCE = 16


class TokenSampler(Protocol):
    """Chooses tokens: `sampler.Sampler`."""

    def sample(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[SampledToken]:
        """logits [rows, vocabulary], one spec a row."""
        ...


def tokens_of(sampler: TokenSampler, logits: torch.Tensor, specs: Sequence[RowSpec]) -> list[SampledToken]:
    """logits [rows, vocabulary], one spec a row; one token a row."""
    scored = [row for row, spec in enumerate(specs) if isinstance(spec, ScoreSpec)]
    sampled = [(row, spec) for row, spec in enumerate(specs) if isinstance(spec, SampleSpec)]
    tokens: dict[int, SampledToken] = {}
    for begin in range(0, len(scored), _ROWS_AT_ONCE):
        rows = scored[begin : begin + _ROWS_AT_ONCE]
        wanted = [spec for row in rows if isinstance(spec := specs[row], ScoreSpec)]
        tokens.update(zip(rows, _scores(logits[rows].float(), wanted), strict=True))
    if sampled:
        chosen = sampler.sample(logits[[row for row, _ in sampled]], [spec for _, spec in sampled])
        tokens.update(zip((row for row, _ in sampled), chosen, strict=True))
    return [tokens[row] for row in range(len(specs))]


def _scores(logits: torch.Tensor, specs: Sequence[ScoreSpec]) -> list[SampledToken]:
    """logits [rows, vocabulary] in fp32."""
    logits = torch.nan_to_num(logits, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    targets = torch.tensor([spec.target for spec in specs])
    most_likely = logits.max(dim=1, keepdim=True).values
    sums = (logits - most_likely).exp().sum(dim=1, dtype=torch.float64)
    normalisers = most_likely[:, 0].double() + sums.log()
    values = logits.gather(1, targets[:, None])
    ids = torch.arange(logits.shape[1])
    # Equal ones by lowest id, as everywhere.
    ranks = 1 + (logits > values).sum(1) + ((logits == values) & (ids < targets[:, None])).sum(1)
    most = min(max(spec.top for spec in specs), logits.shape[1])
    best_values, best_ids = _best(logits, most)
    found = []
    for row, spec in enumerate(specs):
        normaliser = float(normalisers[row])
        top = zip(best_ids[row][: spec.top].tolist(), best_values[row][: spec.top].tolist(), strict=True)
        found.append(
            TokenLogprob(
                token_id=spec.target,
                logprob=_finite(float(values[row, 0]) - normaliser),
                top=tuple((token_id, _finite(value - normaliser)) for token_id, value in top),
                rank=int(ranks[row]),
            )
        )
    return [SampledToken(score.token_id, score) for score in found]


def _best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids [rows, count], best first, equal ones by lowest id."""
    if count == 0:
        return logits[:, :0], torch.empty(len(logits), 0, dtype=torch.int64)
    # A threshold first: `topk` does not say which of equal ones it takes.
    threshold = logits.topk(count, dim=1).values[:, -1:]
    rows_values, rows_ids = [], []
    for row in range(len(logits)):
        ids = torch.nonzero(logits[row] >= threshold[row]).flatten()
        values, order = torch.sort(logits[row][ids], descending=True, stable=True)
        rows_values.append(values[:count])
        rows_ids.append(ids[order][:count])
    return torch.stack(rows_values), torch.stack(rows_ids)


def _finite(logprob: float) -> float:
    """Not a number where the logits were none."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
