"""Which revision a new request goes to."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from antiphon_gateway.groups import Candidate, Group, choose


def group(revision: str, card: str = "card") -> Group:
    return Group("chat/qwen", revision, card)


def shares(candidates: list[Candidate], weights: dict[str, int] | None, newest: str = "card") -> dict[str, float]:
    source = random.Random(11)
    chosen = [choose(candidates, weights, newest, source.random()) for _ in range(4000)]
    counts = Counter(one.revision for one in chosen if one is not None)
    return {revision: count / 4000 for revision, count in counts.items()}


def test_new_requests_are_shared_out_by_weight() -> None:
    found = shares([Candidate(group("a"), 9), Candidate(group("b"), 1)], {"a": 250, "b": 750})
    assert found == pytest.approx({"a": 0.25, "b": 0.75}, abs=0.03)


@pytest.mark.parametrize("weights", [{"a": 1000}, {"a": 1000, "b": 0}])
def test_a_revision_without_weight_gets_nothing_while_another_has_workers(weights: dict[str, int]) -> None:
    assert shares([Candidate(group("a"), 1), Candidate(group("b"), 5)], weights) == {"a": 1.0}
    assert shares([Candidate(group("b"), 5)], weights) == {"b": 1.0}


def test_without_any_weight_workers_count() -> None:
    candidates = [Candidate(group("a"), 1), Candidate(group("b"), 3)]
    for weights in ({}, {"gone": 1000}):
        assert shares(candidates, weights) == pytest.approx({"a": 0.25, "b": 0.75}, abs=0.03)


def test_workers_started_by_hand_with_another_card_count_when_theirs_is_the_newest() -> None:
    old, new = Candidate(group("", "old"), 5), Candidate(group("", "new"), 1)
    assert choose([old, new], None, "new", 0.0) == new.group
    assert choose([old], None, "new", 0.0) == old.group


def test_the_same_draw_gives_the_same_revision_and_nobody_is_nobody() -> None:
    candidates = [Candidate(group("a"), 1), Candidate(group("b"), 1)]
    weights = {"a": 1, "b": 1}
    for draw in (0.0, 0.49, 0.5, 0.999999):
        assert choose(candidates, weights, "card", draw) == choose(candidates[::-1], weights, "card", draw)
    assert choose([], weights, "card", 0.5) is None
