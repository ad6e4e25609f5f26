"""What a prompt's log-probabilities are, by `transformers`' own logits in fp32: the yardstick of every way to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from antiphon_engine.interface import TokenLogprob
from antiphon_proto import worker_pb2 as wire
from transformers import AutoModelForCausalLM, PreTrainedModel

TOLERANCE = 1e-3
"""Engines that batch and cut differently round differently, and ranks add up in another order."""


@dataclass(frozen=True, slots=True)
class ExpectedScore:
    token_id: int
    logprob: float
    values: torch.Tensor
    """Log-probabilities of all ids at its place."""
    top: int


class Score(Protocol):
    @property
    def token_id(self) -> int: ...

    @property
    def logprob(self) -> float: ...

    @property
    def top(self) -> Sequence[tuple[int, float]]: ...

    @property
    def rank(self) -> int: ...


@torch.inference_mode()
def expected_scores(model: PreTrainedModel, prompt: Sequence[int], top: int) -> list[ExpectedScore]:
    """Of the prompt's tokens from the second on."""
    logits = model(torch.tensor([list(prompt)])).logits[0].float()
    logprobs = logits.log_softmax(-1)
    return [
        ExpectedScore(token, float(logprobs[row, token]), logprobs[row], top) for row, token in enumerate(prompt[1:])
    ]


def scores_of_folder(folder: Path, prompts: Sequence[Sequence[int]], top: int) -> list[list[ExpectedScore]]:
    """Of a model in a folder, which is loaded for it and let go."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [expected_scores(model, prompt, top) for prompt in prompts]


def told_by_a_worker(told: Sequence[wire.TokenLogprob]) -> list[TokenLogprob]:
    return [
        TokenLogprob(one.token_id, one.logprob, tuple(zip(one.top_ids, one.top_logprobs, strict=True)), rank=one.rank)
        for one in told
    ]


def assert_scores(found: Sequence[Score], expected: Sequence[ExpectedScore]) -> None:
    assert len(found) == len(expected)
    for ours, wanted in zip(found, expected, strict=True):
        assert ours.token_id == wanted.token_id
        assert math.isclose(ours.logprob, wanted.logprob, abs_tol=TOLERANCE), (ours, wanted.logprob)
        # Near ties may change places.
        certainly = 1 + int((wanted.values > wanted.logprob + TOLERANCE).sum())
        possibly = int((wanted.values > wanted.logprob - TOLERANCE).sum())
        assert certainly <= ours.rank <= max(possibly, 1)
        assert len(ours.top) == wanted.top
        best = wanted.values.topk(wanted.top).values.tolist()
        for (token_id, value), most in zip(ours.top, best, strict=True):
            assert math.isclose(value, most, abs_tol=TOLERANCE)
            assert math.isclose(value, float(wanted.values[token_id]), abs_tol=TOLERANCE)
