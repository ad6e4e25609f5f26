"""From a trace to what is replayed: buckets spread, rates scaled, seeds that change arrivals and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from antiphon_simulate.records import TraceRequest
from antiphon_simulate.traces import Trace, TraceFormat, read_trace
from antiphon_simulate.workload import make_workload, offered_rps

DATA = Path(__file__).parents[1] / "data"
CONVERSATION = read_trace(DATA / "mooncake_conversation_first90s.jsonl")
SESSIONS = read_trace(DATA / "agentic_coding_three_sessions.jsonl.gz")
AZURE = read_trace(DATA / "azure2023_code_first100.csv")


def trace_of(*stamps: float) -> Trace:
    requests = tuple(TraceRequest(index, stamp, 10, 1, ()) for index, stamp in enumerate(stamps))
    return Trace("hand-made", "", TraceFormat.MOONCAKE, requests)


def arrivals(trace: Trace, **options: float) -> list[float]:
    scale, seed = options.get("rate_scale", 1.0), int(options.get("seed", 0))
    return [request.arrival_ms for request in make_workload(trace, rate_scale=scale, seed=seed)]


def test_the_requests_of_a_bucket_are_spread_evenly_over_it() -> None:
    spread = arrivals(trace_of(0, 0, 0, 3000, 3000, 3000, 6000, 6000, 6000))
    for place, arrival_ms in enumerate(spread):
        assert place * 1000.0 <= arrival_ms < (place + 1) * 1000.0


def test_no_bucket_of_a_real_trace_keeps_its_pile_and_none_leaves_its_bucket() -> None:
    recorded = [request.arrival_ms for request in CONVERSATION.requests]
    spread = arrivals(CONVERSATION)
    assert max(Counter(recorded).values()) >= 5
    assert max(Counter(spread).values()) == 1
    assert spread == sorted(spread)
    for stamp, arrival_ms in zip(recorded, spread, strict=True):
        assert stamp <= arrival_ms <= stamp + 3001.0


def test_exact_stamps_stay_where_they_are_within_a_millisecond() -> None:
    for request, arrival_ms in zip(AZURE.requests, arrivals(AZURE), strict=True):
        assert request.arrival_ms <= arrival_ms <= request.arrival_ms + 1.0


@pytest.mark.parametrize("trace", [CONVERSATION, SESSIONS, AZURE], ids=lambda trace: trace.name)
def test_a_seed_changes_when_requests_come_and_nothing_else(trace: Trace) -> None:
    assert arrivals(trace, seed=1) == arrivals(trace, seed=1)
    assert arrivals(trace, seed=1) != arrivals(trace, seed=2)
    one, two = ([replace(request, arrival_ms=0.0) for request in make_workload(trace, seed=seed)] for seed in (1, 2))
    assert one == two


def test_twice_the_rate_is_half_the_time_with_the_same_draws() -> None:
    assert arrivals(CONVERSATION, rate_scale=2.0) == pytest.approx([value / 2.0 for value in arrivals(CONVERSATION)])


def test_in_closed_loops_sessions_begin_earlier_and_pauses_stay() -> None:
    slow, fast = (make_workload(SESSIONS, rate_scale=scale, seed=3) for scale in (1.0, 4.0))
    assert [request.think_ms for request in slow] == [request.think_ms for request in SESSIONS.requests]
    assert [request.think_ms for request in fast] == [request.think_ms for request in slow]
    starts = [min(request.arrival_ms for request in workload if request.session == "s127") for workload in (slow, fast)]
    assert starts[1] == pytest.approx(starts[0] / 4.0)
    # What comes at its own time comes as long after its session's start as ever.
    late = next(request.index for request in SESSIONS.requests if request.session == "s127/1")
    assert fast[late].arrival_ms - starts[1] == pytest.approx(slow[late].arrival_ms - starts[0])


def test_a_limit_takes_the_first_requests_and_keeps_places() -> None:
    assert [request.index for request in make_workload(SESSIONS, limit=7)] == list(range(7))


def test_the_offered_rate_scales() -> None:
    assert offered_rps(trace_of(0, 1000, 2000)) == pytest.approx(1.5)
    assert offered_rps(trace_of(0, 1000, 2000), rate_scale=2.0) == pytest.approx(3.0)
    assert offered_rps(trace_of(7)) == 0.0


def test_the_offered_rate_of_sessions_is_by_their_starts() -> None:
    starts = {}
    for request in SESSIONS.requests:
        starts.setdefault(request.session.partition("/")[0], request.arrival_ms)
    span_s = (max(starts.values()) - min(starts.values())) / 1000.0
    assert offered_rps(SESSIONS) == pytest.approx(len(SESSIONS.requests) / span_s)
