"""What requests were like of late."""

from __future__ import annotations

import random

import pytest
from antiphon_policy.route_records import Workload
from antiphon_policy.workload import WorkloadMeter


def test_before_anything_is_known_it_is_the_default() -> None:
    assert WorkloadMeter().workload() == Workload()


def test_means_follow_what_starts_and_ends() -> None:
    meter = WorkloadMeter()
    for _ in range(500):
        meter.started(2000)
        meter.ended(40)
    known = meter.workload(waiting_tokens=7.0, ttft_limit_ms=300.0, evicted_reuse=0.5)
    assert known.uncached_tokens == pytest.approx(2000, rel=0.01)
    assert known.output_tokens == pytest.approx(40, rel=0.01)
    assert (known.waiting_tokens, known.ttft_limit_ms, known.evicted_reuse) == (7.0, 300.0, 0.5)


def test_one_of_ten_answers_is_shorter_than_the_short_one() -> None:
    draw = random.Random(1)
    meter = WorkloadMeter()
    shorter = 0
    for at in range(6000):
        tokens = draw.choice((10, 100, 200, 300, 400, 500, 600, 700, 800, 900))
        if at >= 2000:
            shorter += tokens < meter.workload().short_output_tokens
        meter.ended(tokens)
    assert 0.05 < shorter / 4000 < 0.2
