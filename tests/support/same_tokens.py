"""What one rank answers to requests of all kinds, as the yardstick for replicas that are spread, batched or disturbed.

The yardstick runs one request after the other, on one rank and `transformers`' own code, in a pool with room for all:
nothing is batched, cut, preempted or found in a cache. It also tells how far the best two scores were apart at each
position, with penalties and noise: as elsewhere, only a token that was chosen by more than `NEAR_TIE` counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from antiphon_engine import BlockEngine, EngineRequest, Sampling, SchedulerConfig
from antiphon_engine.interface import TokenLogprob

from tests.support.engine import Recorder, started
from tests.support.reference import assert_same
from tests.torch_engine.parallel.tiny_models import VOCAB, one_rank

DEADLINE_S = 90.0
LOGPROB_TOLERANCE = 1e-3
"""Ranks add up in another order."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. No two of a test have the same prompt."""

    prompt: tuple[int, ...]
    sampling: Sampling


def asked_of_all_kinds(max_tokens: int) -> list[Asked]:
    """Prompts of 1 to 150 tokens, three of which begin alike; greedy, sampled, penalised, with log-probabilities."""
    generator = torch.Generator().manual_seed(11)

    def some(length: int) -> list[int]:
        return torch.randint(3, VOCAB, (length,), generator=generator).tolist()

    shared = some(70)
    prompts = [
        some(1),
        shared,
        some(16),
        [*shared[:64], *some(40)],
        some(33),
        some(150),
        [*shared, *some(30)],
        some(64),
    ]
    plain = Sampling(max_tokens=max_tokens, ignore_eos=True)
    kinds = [
        dataclasses.replace(plain, temperature=0.0),
        dataclasses.replace(plain, temperature=1.0),
        dataclasses.replace(plain, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4),
        dataclasses.replace(plain, temperature=1.0, frequency_penalty=0.3, top_p=0.9, logprobs=3),
        dataclasses.replace(plain, temperature=0.0, logprobs=2),
    ]
    return [
        Asked(tuple(prompt), dataclasses.replace(kinds[index % len(kinds)], seed=70 + index))
        for index, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True, slots=True)
class Answered:
    """What came for one request, and how far the best two scores were apart at each position."""

    ids: list[int]
    logprobs: list[TokenLogprob]
    gaps: list[float]

    def compare(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> int:
        """Fail unless they are the same up to the first near tie; how many tokens were compared."""
        assert len(ids) == len(self.ids)
        compared = assert_same(ids, (self.ids, self.gaps))
        assert len(logprobs) == len(self.logprobs)
        for ours, wanted in zip(logprobs[:compared], self.logprobs, strict=False):
            assert ours.token_id == wanted.token_id
            assert math.isclose(ours.logprob, wanted.logprob, abs_tol=LOGPROB_TOLERANCE)
            values = zip(ours.top, wanted.top, strict=True)
            assert all(math.isclose(one, other, abs_tol=LOGPROB_TOLERANCE) for (_, one), (_, other) in values)
        return compared


class Asking:
    """An engine and what it has answered. Requests get names of their own."""

    def __init__(self, engine: BlockEngine, recorder: Recorder) -> None:
        self.engine = engine
        self.recorder = recorder
        self._submitted = 0

    def submit(self, requests: Sequence[Asked], cache_salt: bytes = b"") -> list[str]:
        names = [f"r{self._submitted + index}" for index in range(len(requests))]
        self._submitted += len(requests)
        for name, asked in zip(names, requests, strict=True):
            self.engine.submit(EngineRequest(name, asked.prompt, asked.sampling, cache_salt=cache_salt))
        return names

    def wait(self, names: Sequence[str]) -> None:
        recorder = self.recorder
        recorder.wait(
            lambda: recorder.failure is not None or all(name in recorder.finished for name in names), DEADLINE_S
        )
        assert recorder.failure is None
        assert not [recorder.finished[name].error for name in names if recorder.finished[name].error]

    def run(self, requests: Sequence[Asked], cache_salt: bytes = b"") -> list[str]:
        """All at once, to their ends."""
        names = self.submit(requests, cache_salt)
        self.wait(names)
        return names

    def logprobs(self, name: str) -> list[TokenLogprob]:
        return [
            logprob
            for step in self.recorder.steps
            for output in step.outputs
            if output.request_id == name
            for logprob in output.logprobs
        ]

    def compare(self, what: str, names: Sequence[str], expected: Sequence[Answered]) -> None:
        compared = sum(
            answered.compare(self.recorder.tokens[name], self.logprobs(name))
            for name, answered in zip(names, expected, strict=True)
        )
        report_comparison(what, compared, expected)


def report_comparison(what: str, compared: int, expected: Sequence[Answered]) -> None:
    total = sum(len(answered.ids) for answered in expected)
    smallest = min(gap for answered in expected for gap in answered.gaps)
    print(f"{what}: {compared} of {total} tokens equal, smallest gap {smallest:.5f}")
    assert compared >= 0.9 * total, "near ties ended most comparisons"


def answered_by_one_rank(folder: Path, requests: Sequence[Asked]) -> list[Answered]:
    """One after the other, and none with anything in the cache."""
    executor, sampler = one_rank(folder)
    asking = Asking(*started(executor, SchedulerConfig()))
    found = []
    try:
        for index, asked in enumerate(requests):
            [name] = asking.run([asked], cache_salt=b"%d" % index)
            ids = asking.recorder.tokens[name]
            gaps = [sampler.gaps[asked.prompt, position] for position in range(len(ids))]
            found.append(Answered(ids, asking.logprobs(name), gaps))
    finally:
        asking.engine.close()
    return found
