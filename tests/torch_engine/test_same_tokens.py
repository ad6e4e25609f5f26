"""The engine's tokens are `transformers`' tokens, whatever happens to a request on its way.

The real demo model in fp32: chunked prompts, mixed batches, prefix hits, preemption. See tests/support/reference.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from antiphon_engine import BlockEngine, EngineRequest, FinishReason, Sampling, SchedulerConfig
from antiphon_engine.interface import TokenLogprob
from antiphon_engine.torch_engine import TorchSettings, create_torch_executor

from tests.support.engine import Recorder, started
from tests.support.models import demo_model
from tests.support.prompt_scores import TOLERANCE, assert_scores, scores_of_folder
from tests.support.reference import (
    OUTPUT_TOKENS,
    Reference,
    assert_same,
    greedy_references,
    prompts,
    report,
    sampled_references,
    sampling_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_GREEDY = Sampling(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
_DEADLINE_S = 400.0


@dataclass
class _Running:
    """An engine, and requests with names of their own."""

    engine: BlockEngine
    recorder: Recorder
    submitted: int = 0

    def run(self, requests: Sequence[tuple[Sequence[int], Sampling]]) -> list[str]:
        """Submit all at once and wait for their ends; their request ids."""
        names = [f"r{self.submitted + index}" for index in range(len(requests))]
        self.submitted += len(requests)
        for name, (prompt, sampling) in zip(names, requests, strict=True):
            self.engine.submit(EngineRequest(name, prompt, sampling))
        self.recorder.wait(
            lambda: self.recorder.failure is not None or all(name in self.recorder.finished for name in names),
            _DEADLINE_S,
        )
        assert self.recorder.failure is None
        return names

    def tokens(self, prompt: Sequence[int], sampling: Sampling) -> tuple[list[int], FinishReason | None]:
        [name] = self.run([(prompt, sampling)])
        return self.recorder.tokens[name], self.recorder.finished[name].finish

    def compare(self, kind: str, references: Sequence[Reference], samplings: Sequence[Sampling]) -> list[str]:
        names = self.run([(r.prompt, sampling) for r, sampling in zip(references, samplings, strict=True)])
        compared = 0
        for name, reference in zip(names, references, strict=True):
            assert self.recorder.finished[name].finish is FinishReason.LENGTH, self.recorder.finished[name].error
            assert len(self.recorder.tokens[name]) == OUTPUT_TOKENS
            compared += assert_same(self.recorder.tokens[name], reference)
        report(kind, references, compared)
        return names

    def logprobs(self, name: str) -> tuple[list[TokenLogprob], list[TokenLogprob]]:
        """Of the prompt's tokens, and of the answer's."""
        outputs = [output for step in self.recorder.steps for output in step.outputs if output.request_id == name]
        return (
            [one for output in outputs for one in output.prompt_logprobs],
            [one for output in outputs for one in output.logprobs],
        )

    def cached_tokens(self, names: Sequence[str]) -> list[int]:
        return [self.recorder.finished[name].cached_tokens for name in names]


def _start(*, kv_blocks: int, block_tokens: int, threads: int) -> _Running:
    settings = TorchSettings(dtype="float32", kv_blocks=kv_blocks, block_tokens=block_tokens, threads=threads)
    executor = create_torch_executor(settings, lambda _: None)
    config = SchedulerConfig(max_batch_tokens=128, max_sequences=16)
    return _Running(*started(executor, config))


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo_model()


@pytest.fixture(scope="module")
def roomy(folder: Path) -> Iterator[_Running]:
    running = _start(kv_blocks=256, block_tokens=64, threads=2)
    yield running
    running.engine.check_integrity()
    running.engine.close()


@pytest.fixture(scope="module")
def greedy(folder: Path) -> tuple[Reference, ...]:
    return greedy_references(folder)


@pytest.fixture(scope="module")
def sampled(folder: Path) -> tuple[Reference, ...]:
    return sampled_references(folder)


def _samplings() -> list[Sampling]:
    return [sampling_of(index) for index in range(len(prompts()))]


def test_greedy_tokens_equal_generate_with_and_without_prefix_hits(
    roomy: _Running, greedy: tuple[Reference, ...], every: int
) -> None:
    greedy = greedy[::every]
    roomy.compare("greedy, all at once", greedy, [_GREEDY] * len(greedy))
    again = roomy.compare("greedy, from the prefix cache", greedy, [_GREEDY] * len(greedy))
    for cached, reference in zip(roomy.cached_tokens(again), greedy, strict=True):
        assert cached >= (len(reference.prompt) - 1) // 64 * 64


def test_sampled_tokens_equal_the_sampled_reference(
    roomy: _Running, sampled: tuple[Reference, ...], every: int
) -> None:
    roomy.compare("sampled, prompts from the prefix cache", sampled[::every], _samplings()[::every])


def test_preempted_requests_give_the_same_tokens(greedy: tuple[Reference, ...], sampled: tuple[Reference, ...]) -> None:
    """Every second prompt either way: what a preempted request has to compute again is most of the time."""
    running = _start(kv_blocks=40, block_tokens=16, threads=1)
    running.compare("greedy, with preemption", greedy[::2], [_GREEDY] * len(greedy[::2]))
    preemptions = running.engine.preemptions
    assert preemptions > 0
    running.compare("sampled, with preemption", sampled[1::2], _samplings()[1::2])
    assert running.engine.preemptions > preemptions
    report_of_blocks = running.engine.check_integrity()
    assert report_of_blocks.used_blocks == 0
    running.engine.close()


def test_one_at_a_time_and_all_at_once_are_the_same(roomy: _Running, sampled: tuple[Reference, ...]) -> None:
    for index in (0, 12, 19):
        tokens, finish = roomy.tokens(sampled[index].prompt, sampling_of(index))
        assert finish is FinishReason.LENGTH
        assert_same(tokens, sampled[index])


# ------------------------------------------------------------------ log-probabilities of prompts


def test_a_prompts_log_probabilities_equal_transformers(roomy: _Running, folder: Path) -> None:
    """In chunks, beside each other, cold and with all of it in the cache; one that shares a beginning with another."""
    asked = [prompts()[index] for index in (1, 8, 15)]
    expected = scores_of_folder(folder, asked, 3)
    wanted = dataclasses.replace(_GREEDY, prompt_logprobs=3, max_tokens=2)
    for _ in range(2):
        names = roomy.run([(prompt, wanted) for prompt in asked])
        for name, scores in zip(names, expected, strict=True):
            assert_scores(roomy.logprobs(name)[0], scores)
        assert roomy.cached_tokens(names) == [0] * len(asked)


def test_an_answer_sent_again_as_a_prompt_is_as_likely_as_it_was(roomy: _Running) -> None:
    prompt = prompts()[9]
    wanted = dataclasses.replace(_GREEDY, logprobs=2, max_tokens=24)
    [answered] = roomy.run([(prompt, wanted)])
    _, own = roomy.logprobs(answered)
    again = [*prompt, *roomy.recorder.tokens[answered]]
    [asked] = roomy.run([(again, dataclasses.replace(_GREEDY, prompt_logprobs=2, max_tokens=0))])
    told, none = roomy.logprobs(asked)
    assert none == []
    assert len(told) == len(again) - 1
    behind = told[len(prompt) - 1 :]
    assert [one.token_id for one in behind] == [one.token_id for one in own]
    assert [one.logprob for one in behind] == pytest.approx([one.logprob for one in own], abs=TOLERANCE)
    assert {one.rank for one in behind} == {1}


# ------------------------------------------------------------------ limits


def test_nothing_but_allowed_ids_comes_and_no_bad_word_is_completed(roomy: _Running) -> None:
    prompt, plain = prompts()[9], dataclasses.replace(_GREEDY, max_tokens=8)
    usual, _ = roomy.tokens(prompt, plain)
    tokens, _ = roomy.tokens(prompt, dataclasses.replace(plain, bad_words=(tuple(usual[1:3]), (usual[5],))))
    assert tokens[:2] == usual[:2]
    assert tokens[2] != usual[2]
    assert usual[5] not in tokens
    allowed = tuple(sorted({*usual[:4], 500, 700}))
    tokens, _ = roomy.tokens(prompt, dataclasses.replace(plain, allowed_token_ids=allowed))
    assert set(tokens) <= set(allowed)
    assert tokens[:4] == usual[:4]


# ------------------------------------------------------------------ the first token ends it


def test_max_tokens_one(roomy: _Running, greedy: tuple[Reference, ...]) -> None:
    for reference in (greedy[2], greedy[19]):
        tokens, finish = roomy.tokens(reference.prompt, dataclasses.replace(_GREEDY, max_tokens=1))
        assert tokens == list(reference.ids[:1])
        assert finish is FinishReason.LENGTH


def test_a_stop_id_as_the_first_token(roomy: _Running, greedy: tuple[Reference, ...]) -> None:
    reference = greedy[3]
    first = reference.ids[0]
    tokens, finish = roomy.tokens(reference.prompt, dataclasses.replace(_GREEDY, stop_token_ids=frozenset({first})))
    assert (tokens, finish) == ([first], FinishReason.STOP)


def test_eos_as_the_first_token(roomy: _Running, greedy: tuple[Reference, ...]) -> None:
    [eos] = roomy.engine.info.eos_token_ids
    forced = dataclasses.replace(_GREEDY, logit_bias={eos: 100.0}, ignore_eos=False)
    assert roomy.tokens(greedy[3].prompt, forced) == ([eos], FinishReason.STOP)
    ignored = dataclasses.replace(forced, ignore_eos=True, max_tokens=3)
    assert roomy.tokens(greedy[3].prompt, ignored) == ([eos] * 3, FinishReason.LENGTH)
    late = dataclasses.replace(forced, min_tokens=2)
    tokens, finish = roomy.tokens(greedy[3].prompt, late)
    assert tokens == [*greedy[3].ids[:2], eos]
    assert finish is FinishReason.STOP
