"""Chooses tokens from logits. Each row is a function of its logits and its `SampleSpec` alone.

For logits l of one row, in this order (as vLLM, and OpenAI where it defines them):

* a grammar's mask: what it does not allow is -inf;
* log-probabilities, if asked for: log_softmax(l), before anything else;
* allowed ids, if there are any: all others are -inf;
* repetition penalty r, for ids in prompt or output: l / r if l > 0, else l * r;
* frequency penalty f and presence penalty p, for ids in the output: l - f * count - p;
* logit bias: l + bias; forbidden ids: -inf;
* temperature t: l / t. From here on 0 means: take the best, lowest id first;
* top-k: the k best stay; equal ones by lowest id;
* top-p: of the softmax over what stays, sorted from the best, those before which less than top_p has been summed;
* min-p: ids whose probability is at least min_p times the best one's;
* the choice, by Gumbel-max: argmax of l + g with g = -log(E), E = -log(1 - u), and u the id's noise (`noise.py`).

The choice does not compute g for a whole vocabulary. argmax(l + g) is argmin of E / exp(l), and u <= E: so with the
coarse noise alone an id is out if its coarse u / exp(l) is above an upper bound of the best one. Few ids are left
(one or two as a rule), and for these the exact numbers are computed in fp64. So neither batch nor filters nor
vectorisation change which id wins.

A row whose logits are not numbers counts as -inf there and is logged; a row of which nothing is left gives its lowest
id that is allowed and not forbidden, and NO_TOKEN where there is none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from antiphon_engine.executor import NO_TOKEN, SampledToken, SampleSpec
from antiphon_engine.interface import Sampling, TokenLogprob
from antiphon_engine.torch_engine.noise import COARSE_STEPS, IdArray, Noise
from antiphon_engine.torch_engine.scores import LOWEST_LOGPROB, best_ids

logger = logging.getLogger("antiphon.engine.torch")

Logits = NDArray[np.float32]
Allowed = NDArray[np.bool_]

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would only overflow."""
_NEGLIGIBLE = 60.0
"""An id that many nats below the best (1e-26) never wins within 48 bits of noise."""
_ROUNDING_MARGIN = 1.0 + 1e-4
"""Over the rounding of the fp32 estimates that only exclude ids."""
_SPARSE_IDS = 4096
"""Up to so many ids, noise is computed for them one by one; above, for the whole vocabulary at once."""
_FIRST_NUCLEUS = 512


class Sampler:
    """For one vocabulary. Keeps no state."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[SampledToken]:
        """logits [rows, vocabulary] in any float dtype, one spec a row; one token a row."""
        if logits.shape != (len(specs), self._vocab_size):
            raise ValueError(f"logits have shape {tuple(logits.shape)}, expected {(len(specs), self._vocab_size)}")
        rows: Logits = logits.detach().float().cpu().numpy()
        if all(_is_plain(spec) for spec in specs):
            best = rows.argmax(axis=1)  # the first of equal ones; a NaN if there is one
            if not np.isnan(rows[np.arange(len(specs)), best]).any():
                return [SampledToken(token_id, None) for token_id in best.tolist()]
        return [self._sample_row(row, spec) for row, spec in zip(rows, specs, strict=True)]

    def _sample_row(self, raw: Logits, spec: SampleSpec) -> SampledToken:
        raw = _numbers_only(raw)
        allowed = _allowed(spec, self._vocab_size)
        if allowed is not None:
            raw = np.where(allowed, raw, np.float32(-np.inf))
        row = self._adjusted(raw, spec)
        sampling = spec.sampling
        if spec.allowed_ids is not None:
            allowed = _also(allowed, spec.allowed_ids.ids, self._vocab_size)
            row = np.where(allowed, row, np.float32(-np.inf))
        best = float(row.max())
        if best == -math.inf:
            token_id = _lowest_allowed(spec.forbidden, allowed, self._vocab_size)
        elif sampling.temperature < _GREEDY_BELOW:
            token_id = int(row.argmax())
        else:
            token_id = self._random_id(row, spec, allowed)
        if sampling.logprobs is None:
            return SampledToken(token_id, None)
        if token_id == NO_TOKEN:
            return SampledToken(NO_TOKEN, None)
        return SampledToken(token_id, _logprobs(raw, token_id, sampling.logprobs, masked=spec.allowed is not None))

    def _adjusted(self, raw: Logits, spec: SampleSpec) -> Logits:
        """Penalties, bias and forbidden ids; `raw` itself where there are none."""
        sampling = spec.sampling
        row = raw
        if sampling.repetition_penalty != 1.0:
            row = raw.copy()
            seen = self._known(np.unique(np.array([*spec.prompt, *spec.output], dtype=np.int64)))
            values = row[seen]
            penalty = np.float32(sampling.repetition_penalty)
            row[seen] = np.where(values > 0, values / penalty, values * penalty)
        if (sampling.frequency_penalty or sampling.presence_penalty) and spec.output:
            row = raw.copy() if row is raw else row
            ids, counts = np.unique(self._known(np.array(spec.output, dtype=np.int64)), return_counts=True)
            penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
            row[ids] -= penalties.astype(np.float32)
        if sampling.logit_bias or spec.forbidden:
            row = raw.copy() if row is raw else row
            for token_id, bias in sampling.logit_bias.items():
                if 0 <= token_id < self._vocab_size:
                    row[token_id] += np.float32(bias)
            row[self._known(np.array(sorted(spec.forbidden), dtype=np.int64))] = -np.inf
        return row

    def _known(self, ids: IdArray) -> IdArray:
        return ids[(ids >= 0) & (ids < self._vocab_size)]

    def _random_id(self, row: Logits, spec: SampleSpec, allowed: Allowed | None) -> int:
        sampling = spec.sampling
        row = row / np.float32(sampling.temperature)
        best = float(row.max())
        if best == math.inf:
            row = np.where(row == np.inf, np.float32(0), np.float32(-np.inf))
        ids = _filtered(row, sampling, _few(allowed))
        noise = Noise(sampling.seed, sampling.choice, spec.position)
        return _gumbel_max(row, ids, noise)


def _is_plain(spec: SampleSpec) -> bool:
    """Greedy and nothing else: the best logit."""
    sampling = spec.sampling
    return (
        sampling.temperature < _GREEDY_BELOW
        and spec.allowed is None
        and spec.allowed_ids is None
        and sampling.logprobs is None
        and not spec.forbidden
        and not sampling.logit_bias
        and sampling.repetition_penalty == 1.0
        and sampling.frequency_penalty == 0.0
        and sampling.presence_penalty == 0.0
    )


def _numbers_only(row: Logits) -> Logits:
    if not np.isnan(row.max()):
        return row
    logger.error("logits are not numbers: the weights are damaged or the model overflows in this dtype")
    return np.nan_to_num(row, nan=-np.inf, posinf=np.inf, neginf=-np.inf)


def _allowed(spec: SampleSpec, vocab_size: int) -> Allowed | None:
    """[vocabulary]: what the grammar allows; None: all. Here its mask is waited for."""
    bits = None if spec.allowed is None else spec.allowed.bits()
    if bits is None:
        return None
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


def _also(allowed: Allowed | None, ids: IdArray, vocab_size: int) -> Allowed:
    """Of what is allowed, those that are among `ids`."""
    among = np.zeros(vocab_size, dtype=np.bool_)
    among[ids[ids < vocab_size]] = True
    return among if allowed is None else among & allowed


def _few(allowed: Allowed | None) -> IdArray | None:
    """The allowed ids, where they are so few that noise for them alone is less work."""
    if allowed is None or np.count_nonzero(allowed) > _SPARSE_IDS:
        return None
    return np.flatnonzero(allowed)


def _lowest_allowed(forbidden: frozenset[int], allowed: Allowed | None, vocab_size: int) -> int:
    ids = range(vocab_size) if allowed is None else np.flatnonzero(allowed).tolist()
    return next((token_id for token_id in ids if token_id not in forbidden), NO_TOKEN)


# ------------------------------------------------------------------ filters


def _filtered(row: Logits, sampling: Sampling, ids: IdArray | None) -> IdArray | None:
    """Of `ids` (all if None; ascending), those that top-k, top-p and min-p leave, ascending. None: all."""
    values = row if ids is None else row[ids]
    if 0 < sampling.top_k < len(values):
        places = np.sort(best_ids(values, sampling.top_k))
        ids = places if ids is None else ids[places]
    if sampling.top_p < 1.0:
        ids = _nucleus(row, ids, sampling.top_p)
    if sampling.min_p > 0.0:
        lowest = np.float32(float(row.max()) + math.log(min(sampling.min_p, 1.0)))
        ids = np.flatnonzero(row >= lowest) if ids is None else ids[row[ids] >= lowest]
    return ids


def _nucleus(row: Logits, ids: IdArray | None, top_p: float) -> IdArray:
    """The best of `ids` (all if None) before which less than `top_p` of their mass has been summed; ascending."""
    values = row if ids is None else row[ids]
    best = values.max()
    total = float(np.exp(values - best).sum(dtype=np.float64))
    count = min(_FIRST_NUCLEUS, len(values))
    while True:
        places = best_ids(values, count)
        mass = np.exp(values[places] - best).astype(np.float64)
        before = np.cumsum(mass) - mass
        stays = int(np.count_nonzero(before < top_p * total))
        if stays < count or count == len(values):
            places = np.sort(places[: max(1, stays)])
            return places if ids is None else ids[places]
        count = min(count * 8, len(values))


# ------------------------------------------------------------------ choice


def _gumbel_max(row: Logits, ids: IdArray | None, noise: Noise) -> int:
    """The id of `ids` (all if None) that the noise chooses, in proportion to exp(row)."""
    values = row if ids is None else row[ids]
    best = values.max()
    if ids is not None and len(ids) <= _SPARSE_IDS:
        coarse = noise.coarse_of(ids)
    else:
        coarse = noise.coarse_of_all(len(row))
        coarse = coarse if ids is None else coarse[ids]
    # 1 / probability, up to a common factor; the clip keeps it finite, and what it clips cannot win.
    inverse = np.exp(np.minimum(best - values, np.float32(_NEGLIGIBLE)))
    lower = coarse * inverse  # in units of 1 / COARSE_STEPS, as is `bound`
    leader = int((lower + inverse).argmin())
    leader_noise = (int(coarse[leader]) + 1) / COARSE_STEPS
    bound = math.inf
    if leader_noise < 1.0:
        bound = -math.log1p(-leader_noise) * COARSE_STEPS * float(inverse[leader]) * _ROUNDING_MARGIN
    left = np.flatnonzero((lower <= bound) & (best - values < _NEGLIGIBLE))
    candidates = left if ids is None else ids[left]
    exponential = -np.log1p(-noise.uniform_of(candidates))
    scores = row[candidates].astype(np.float64) - np.log(exponential)
    return int(candidates[int(scores.argmax())])


# ------------------------------------------------------------------ log-probabilities


def _logprobs(row: Logits, token_id: int, count: int, *, masked: bool) -> TokenLogprob:
    """`masked`: alternatives that cannot be sampled are left out, so there may be fewer than `count`."""
    best = row.max()
    if not np.isfinite(best):
        return TokenLogprob(token_id, 0.0 if row[token_id] == best else LOWEST_LOGPROB)
    normaliser = float(best) + math.log(float(np.exp(row - best).sum(dtype=np.float64)))
    top = best_ids(row, count) if count > 0 else np.empty(0, dtype=np.int64)
    if masked:
        top = top[row[top] > -np.inf]
    return TokenLogprob(
        token_id=token_id,
        logprob=max(float(row[token_id]) - normaliser, LOWEST_LOGPROB),
        top=tuple((int(other), max(float(row[other]) - normaliser, LOWEST_LOGPROB)) for other in top),
    )
