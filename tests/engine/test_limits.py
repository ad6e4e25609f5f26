"""Allowed ids and words that are never completed: what they forbid when, and what happens where nothing is left."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from antiphon_engine import EngineRequest, FinishReason, RefusalReason, RequestRefused, SchedulerConfig
from antiphon_engine.limits import AllowedIds, WordBans
from antiphon_engine.scheduler import NOTHING_LEFT

from tests.support.engine import Driver, expected_tokens, generate, prefill, timed_executor

PROMPT = list(range(9))


def limited(request: EngineRequest, **limits: Any) -> EngineRequest:
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **limits))


def driver() -> Driver:
    return Driver(timed_executor(64), SchedulerConfig())


def test_what_would_complete_a_word_is_forbidden_and_nothing_else() -> None:
    bans = WordBans([(5,), (1, 2), (3, 1, 4), (1, 1, 9), ()])
    assert bans.forbidden_after([]) == {5}
    assert bans.forbidden_after([1]) == {5, 2}
    assert bans.forbidden_after([3, 1]) == {5, 2, 4}
    assert bans.forbidden_after([3, 1, 1]) == {5, 2, 9}
    assert bans.forbidden_after([1, 3]) == {5}


def test_allowed_ids_are_the_same_at_the_other_end() -> None:
    ids = AllowedIds((7, 3, 7))
    assert ids.ids.tolist() == [3, 7]
    assert AllowedIds.unpacked(ids.packed).ids.tolist() == [3, 7]


def test_nothing_but_allowed_ids_is_sampled_and_words_stay_incomplete() -> None:
    engine = driver()
    plain = expected_tokens(PROMPT, 24)
    engine.submit(limited(generate("allowed", PROMPT, max_tokens=24), allowed_token_ids=(70, 65)))
    engine.submit(limited(generate("word", PROMPT, max_tokens=24), bad_words=(tuple(plain[3:6]), (plain[8],))))
    engine.run()
    assert set(engine.tokens["allowed"]) == {65, 70}
    told = engine.tokens["word"]
    assert told[:5] == plain[:5], "until the word's last token nothing is different"
    assert told[5] != plain[5]
    assert plain[8] not in told


def test_where_nothing_is_left_the_request_alone_ends_with_a_sentence() -> None:
    engine = driver()
    engine.submit(limited(generate("none", PROMPT), allowed_token_ids=(65, 66), bad_words=((65,), (66,))))
    engine.submit(generate("other", PROMPT, max_tokens=4))
    engine.submit(limited(prefill("first", PROMPT), allowed_token_ids=(65,), bad_words=((65,),)))
    engine.run()
    ended = engine.finished["none"]
    assert ended.finish is FinishReason.ERROR
    assert ended.error.startswith(NOTHING_LEFT)
    assert engine.prefills["first"][-1].error.startswith(NOTHING_LEFT)
    assert engine.tokens["other"] == expected_tokens(PROMPT, 4)
    engine.scheduler.check_integrity()


def test_an_allowed_id_outside_the_vocabulary_is_refused() -> None:
    engine = driver()
    with pytest.raises(RequestRefused, match="allowed token id") as refused:
        engine.submit(limited(generate("a", PROMPT), allowed_token_ids=(10**6,)))
    assert refused.value.reason is RefusalReason.INVALID
