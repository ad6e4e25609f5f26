"""What is kept of a Model's requests: bounded, whatever comes, and sums that stay true."""

from __future__ import annotations

import random

import pytest
from antiphon_gateway.scaling_window import BUCKET_MS, UNKNOWN_OUTPUT_TOKENS, WINDOW_MS, DemandWindow, thinned
from antiphon_policy.scaling.news import MOST_NEWS_SAMPLES
from antiphon_policy.scaling.records import RequestSample

NOW_MS = 1_764_520_500_000.0


def sample(at_ms: float = NOW_MS, uncached: int = 100, prompt: int = 400, output: int = 20) -> RequestSample:
    return RequestSample(at_ms, uncached, prompt, output, 1.0, 50.0, 10.0)


def window() -> DemandWindow:
    return DemandWindow(NOW_MS - WINDOW_MS, random.Random(7).random)


def test_few_are_told_as_they_were_and_in_their_order() -> None:
    kept = window()
    ended = [sample(NOW_MS - at) for at in (30.0, 10.0, 20.0)]
    for one in ended:
        kept.ended(one, served=True)
    running = sample(NOW_MS - 15.0)
    assert kept.samples(NOW_MS, [running]) == (ended[0], ended[2], running, ended[1])


def test_what_came_before_the_window_is_not_told() -> None:
    kept = window()
    old, new = sample(NOW_MS - WINDOW_MS - 1), sample(NOW_MS - WINDOW_MS + 1)
    kept.ended(old, served=True)
    kept.ended(new, served=True)
    assert kept.samples(NOW_MS, [old]) == (new,)
    assert kept.samples(NOW_MS + 2) == ()


def test_many_are_bounded_and_stand_for_as_many_as_came() -> None:
    """A day's traffic in five minutes: memory and news stay small; counts are exact, means are near."""
    kept, drawn = window(), random.Random(3)
    count = 40_000
    prompts = outputs = 0
    for number in range(count):
        # Long and short in turn: whoever takes every second one would see one kind only.
        one = sample(NOW_MS - WINDOW_MS + number * WINDOW_MS / count, prompt=4000 if number % 2 else 40)
        one = RequestSample(one.at_ms, one.prompt_tokens, one.prompt_tokens, drawn.randrange(1, 400))
        prompts, outputs = prompts + one.prompt_tokens, outputs + one.output_tokens
        kept.ended(one, served=True)
        assert len(kept._ended) < 2 * MOST_NEWS_SAMPLES
    told = kept.samples(NOW_MS - WINDOW_MS + 1)
    assert len(told) <= MOST_NEWS_SAMPLES
    assert sum(one.weight for one in told) == pytest.approx(count, rel=1e-9)
    assert sum(one.weight * one.prompt_tokens for one in told) == pytest.approx(prompts, rel=0.08)
    assert sum(one.weight * one.output_tokens for one in told) == pytest.approx(outputs, rel=0.08)
    # Early ones were thinned more often than late ones; both halves stand for themselves, and nobody for very many.
    middle = NOW_MS - WINDOW_MS / 2
    assert sum(one.weight for one in told if one.at_ms < middle) == pytest.approx(count / 2, rel=0.08)
    assert max(one.weight for one in told) <= 4 * count / len(told)


def test_when_less_comes_each_is_kept_again() -> None:
    kept = window()
    for number in range(3 * MOST_NEWS_SAMPLES):
        kept.ended(sample(NOW_MS + number * 1e-3), served=True)
    assert max(one.weight for one in kept.samples(NOW_MS)) > 1.0
    later_ms = NOW_MS + WINDOW_MS + 1000.0
    for _ in range(12):
        assert sum(one.weight for one in kept.samples(later_ms)) == 0.0
    quiet = [sample(later_ms + number) for number in range(5)]
    for one in quiet:
        kept.ended(one, served=True)
    assert kept.samples(later_ms) == tuple(quiet)


@pytest.mark.parametrize("draw", [lambda: 0.0, lambda: 0.999999])
def test_thinning_keeps_the_weight_whatever_is_drawn(draw: object) -> None:
    weighted = [RequestSample(float(at), 1, 1, 1, 0.1 + at % 7) for at in range(500)]
    for most in (1, 3, 499):
        told = thinned(weighted, most, draw)  # type: ignore[arg-type]
        assert len(told) == most
        assert sum(one.weight for one in told) == pytest.approx(sum(one.weight for one in weighted), rel=1e-9)
        assert [one.at_ms for one in told] == sorted(one.at_ms for one in told)
    assert thinned(weighted, 500, draw) == weighted  # type: ignore[arg-type]


def test_arrivals_are_counted_in_whole_buckets_and_quiet_ones_are_there() -> None:
    kept = DemandWindow(NOW_MS - 35_000.0)
    for before_ms, choices in ((34_000.0, 1), (31_000.0, 2), (11_000.0, 4), (1.0, 8)):
        kept.arrived(NOW_MS - before_ms, choices)
    counts = kept.arrivals(NOW_MS + 3_000.0)
    # 35 s ago lies in the bucket that began 40 s ago; the one that is not over is left out.
    assert (counts.end_ms, counts.bucket_ms) == (NOW_MS, BUCKET_MS)
    assert counts.counts == (3.0, 0.0, 4.0, 8.0)
    late = kept.arrivals(NOW_MS + WINDOW_MS)
    assert len(late.counts) == WINDOW_MS / BUCKET_MS
    assert sum(late.counts) == 0.0


def test_what_is_expected_is_what_was_and_something_before_that() -> None:
    kept = window()
    assert (kept.expected_output_tokens, kept.uncached_share) == (UNKNOWN_OUTPUT_TOKENS, 1.0)
    kept.ended(sample(output=9999), served=False)
    assert kept.expected_output_tokens == UNKNOWN_OUTPUT_TOKENS
    for output in (10, 30):
        kept.ended(sample(uncached=100, prompt=400, output=output), served=True)
    assert kept.expected_output_tokens == pytest.approx(20.0, rel=0.01)
    assert kept.uncached_share == pytest.approx(0.25)


def test_hits_are_of_the_window_too_and_an_empty_window_says_so() -> None:
    kept = window()
    kept.hit(NOW_MS, "a", 64)
    kept.hit(NOW_MS, "a", 128)
    kept.hit(NOW_MS - 20_000.0, "b", 64)
    assert kept.hits(NOW_MS) == {"a": 192, "b": 64}
    kept.arrived(NOW_MS, 1)
    assert not kept.is_empty(NOW_MS)
    later_ms = NOW_MS + WINDOW_MS + BUCKET_MS
    assert kept.hits(later_ms) == {}
    assert kept.is_empty(later_ms)


def test_counting_alone_keeps_no_more_than_the_window() -> None:
    """Where nobody asks (no Redis, no Prometheus), nothing grows with the days."""
    kept = window()
    for bucket in range(1000):
        kept.arrived(NOW_MS + bucket * BUCKET_MS, 1)
    assert len(kept._arrived) <= WINDOW_MS / BUCKET_MS + 1
