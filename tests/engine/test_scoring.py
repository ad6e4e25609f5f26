"""Log-probabilities of a prompt: each token's once, in order, whatever becomes of the request. On the timed executor,
whose numbers follow from a token and its place."""

from __future__ import annotations

import dataclasses

import pytest
from antiphon_engine import EngineRequest, FinishReason, RequestKind, SchedulerConfig
from antiphon_engine._step import StepNews
from antiphon_engine.interface import TokenLogprob
from antiphon_engine.scheduler import MAX_SCORED_ROWS
from antiphon_engine.timed import timed_logprob

from tests.support.engine import BLOCK_TOKENS, Driver, expected_tokens, generate, hashes_of, prefill, timed_executor


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + number) % 256 for number in range(length)]


def scoring(request: EngineRequest, top: int = 2) -> EngineRequest:
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, prompt_logprobs=top))


class ScoringDriver(Driver):
    """Also collects what is told of prompts."""

    def __init__(self, num_blocks: int = 64, **config: int) -> None:
        super().__init__(timed_executor(num_blocks), SchedulerConfig(**config))
        self.scores: dict[str, list[TokenLogprob]] = {}

    def _take(self, news: StepNews) -> None:
        for one in (*news.outputs, *news.prefills):
            if one.prompt_logprobs:
                assert not self.tokens.get(one.request_id), "told behind its first token"
            self.scores.setdefault(one.request_id, []).extend(one.prompt_logprobs)
        super()._take(news)


def assert_told(told: list[TokenLogprob], tokens: list[int], *, begin: int = 1) -> None:
    assert [(one.token_id, one.logprob) for one in told] == [
        (token, timed_logprob(token, place)) for place, token in enumerate(tokens[begin:], start=begin)
    ]


@pytest.mark.parametrize("max_batch_tokens", [1, 3, BLOCK_TOKENS, 7, 512])
def test_each_token_but_the_first_is_told_once_in_whatever_chunks(max_batch_tokens: int) -> None:
    engine = ScoringDriver(max_batch_tokens=max_batch_tokens)
    tokens = prompt(21)
    engine.submit(scoring(generate("a", tokens, max_tokens=3)))
    engine.run()
    assert_told(engine.scores["a"], tokens)
    assert {len(one.top) for one in engine.scores["a"]} == {2}
    assert engine.tokens["a"] == expected_tokens(tokens, 3)


def test_nothing_of_a_cache_is_used_and_everything_gets_into_it() -> None:
    engine = ScoringDriver()
    tokens = prompt(21)
    engine.submit(generate("plain", tokens, max_tokens=1))
    engine.run()
    engine.submit(scoring(generate("a", tokens, max_tokens=3)))
    engine.run()
    assert_told(engine.scores["a"], tokens)
    assert engine.finished["a"].cached_tokens == 0
    other = prompt(21, 100)
    engine.submit(scoring(generate("b", other, max_tokens=3)))
    engine.run()
    assert len(engine.pool.leading(hashes_of(engine.executor, other))) == len(other) // BLOCK_TOKENS
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("length", [1, 2, 8, 9])
def test_with_max_tokens_0_the_prompt_is_all_there_is(length: int) -> None:
    engine = ScoringDriver()
    tokens = prompt(length)
    engine.submit(scoring(generate("a", tokens, max_tokens=0)))
    engine.run()
    assert_told(engine.scores.get("a", []), tokens)
    assert engine.tokens["a"] == []
    assert engine.finished["a"].finish is FinishReason.LENGTH
    assert engine.scheduler.check_integrity().used_blocks == 0


def test_one_step_scores_a_bounded_number_of_rows_of_all_prompts_together() -> None:
    engine = ScoringDriver(num_blocks=200, max_batch_tokens=400)
    long, short = prompt(300), prompt(40, 7)
    engine.submit(scoring(generate("long", long, max_tokens=1)))
    engine.submit(scoring(generate("short", short, max_tokens=1)))
    engine.submit(generate("plain", prompt(50, 90), max_tokens=1))
    rows = []
    while (plan := engine.step()).parts:
        rows.append(sum(len(part.step.scoring.targets) for part in plan.parts if part.step.scoring is not None))
        if len(rows) == 1:
            assert [part.step.request_id for part in plan.parts] == ["long", "plain"], "the others need not wait for it"
    assert max(rows) == MAX_SCORED_ROWS
    assert_told(engine.scores["long"], long)
    assert_told(engine.scores["short"], short)


def test_a_prompt_that_is_preempted_in_the_middle_tells_nothing_twice_and_uses_what_it_told() -> None:
    """Nine blocks: the first request's growth takes the second one's, which is half computed."""
    engine = ScoringDriver(num_blocks=9, max_batch_tokens=3)
    grows, tokens = prompt(4, 50), prompt(22)
    engine.submit(generate("grows", grows, max_tokens=12))
    engine.step()
    engine.submit(scoring(generate("a", tokens, max_tokens=2)))
    engine.run()
    assert engine.scheduler.preemptions > 0
    assert_told(engine.scores["a"], tokens)
    assert engine.tokens["grows"] == expected_tokens(grows, 12)
    assert engine.tokens["a"] == expected_tokens(tokens, 2)
    engine.scheduler.check_integrity()


def test_a_prefill_tells_them_with_its_chunks() -> None:
    engine = ScoringDriver(max_batch_tokens=8)
    tokens = prompt(21)
    engine.submit(prefill("other", tokens))
    engine.run()
    engine.submit(scoring(prefill("a", tokens)))
    engine.run()
    assert [len(one.prompt_logprobs) for one in engine.prefills["a"]] == [8, 8, 4]
    assert_told(engine.scores["a"], tokens)
    assert engine.prefills["a"][-1].cached_tokens == 0


@pytest.mark.parametrize(("published", "told"), [(0, 0), (8, 9), (20, 20), (16, 5), (8, 8)])
def test_a_held_request_goes_on_where_another_engine_stopped_telling(published: int, told: int) -> None:
    """Also where more was pulled than was told: that is computed here."""
    engine = ScoringDriver()
    tokens = prompt(21)
    engine.submit(generate("cached", tokens, max_tokens=1))
    engine.run()
    engine.submit(scoring(generate("a", tokens, max_tokens=2, held=True)))
    if published:
        engine.fill("a", tokens[:published])
    engine.scheduler.resume("a", [], told)
    engine.run()
    assert_told(engine.scores.get("a", []), tokens, begin=1 + told)
    assert engine.tokens["a"] == expected_tokens(tokens, 2)
    engine.scheduler.check_integrity()


def test_an_answer_that_goes_on_with_all_told_tells_nothing() -> None:
    engine = ScoringDriver()
    tokens = prompt(21)
    request = scoring(generate("a", tokens, max_tokens=4, held=True))
    engine.submit(request)
    engine.fill("a", tokens)
    first = expected_tokens(tokens, 4)[:1]
    engine.scheduler.resume("a", first, len(tokens) - 1)
    engine.run()
    assert engine.scores.get("a", []) == []
    assert [*first, *engine.tokens["a"]] == expected_tokens(tokens, 4)
    assert request.kind is RequestKind.GENERATE
