"""What is replayed: a trace at a rate, with the arrivals that a seed draws.

A recorded stamp says less than it seems to. Mooncake's come in buckets of three seconds with ten requests in each:
replayed as they are, queues look far worse than they were. So the requests of a bucket are spread evenly over it, each
at a random place in its share. Where stamps are exact, only equal ones are moved, within their millisecond. The start
times of sessions in closed-loop traces are spread by up to the mean time between two of them.

`rate_scale` divides the times between arrivals (of sessions, in closed loops), with the same draws at all rates. A
client's pause before its next request is its own and does not scale. No seed ever changes a length.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from antiphon_simulate.records import TraceRequest
from antiphon_simulate.traces import Trace, TraceFormat

_EXACT_MS = 1.0
"""What a stamp may be off by in traces without buckets."""
_BUCKETED = 2.0
"""Requests for each distinct stamp from which on stamps are taken to be buckets."""


def make_workload(
    trace: Trace, *, rate_scale: float = 1.0, seed: int = 0, limit: int | None = None
) -> list[TraceRequest]:
    """The first `limit` requests of the trace, in its order, so that `workload[i].index == i`."""
    requests = trace.head(limit).requests
    if trace.format is TraceFormat.SESSIONS:
        return _sessions(requests, rate_scale, random.Random(f"{seed} session starts"))
    return _spread(requests, rate_scale, random.Random(f"{seed} arrivals"))


def offered_rps(trace: Trace, *, rate_scale: float = 1.0, limit: int | None = None) -> float:
    """Requests per second that come in: requests over the time from the first to the last arrival. In closed loops,
    where the answers decide when requests come: requests over the time in which sessions begin, which is what would
    come in if sessions went on beginning at that rate."""
    requests = trace.head(limit).requests
    starts = _session_starts(requests) if trace.format is TraceFormat.SESSIONS else {}
    stamps = list(starts.values()) or [request.arrival_ms for request in requests]
    span_ms = max(stamps) - min(stamps)
    return 1000.0 * rate_scale * len(requests) / span_ms if span_ms > 0.0 else 0.0


def _spread(requests: Sequence[TraceRequest], rate_scale: float, draws: random.Random) -> list[TraceRequest]:
    stamps = sorted({request.arrival_ms for request in requests})
    width_ms = _bucket_ms(stamps, len(requests))
    following = dict(pairwise(stamps))
    shares: dict[float, int] = {}
    for request in requests:
        shares[request.arrival_ms] = shares.get(request.arrival_ms, 0) + 1
    seen: dict[float, int] = {}
    workload = []
    for request in requests:
        stamp = request.arrival_ms
        place = seen.get(stamp, 0)
        seen[stamp] = place + 1
        bucket_ms = min(width_ms, following.get(stamp, stamp + width_ms) - stamp)
        arrival_ms = stamp + bucket_ms * (place + draws.random()) / shares[stamp]
        workload.append(replace(request, arrival_ms=arrival_ms / rate_scale))
    return workload


def _bucket_ms(stamps: Sequence[float], requests: int) -> float:
    if len(stamps) < 2 or requests < _BUCKETED * len(stamps):
        return _EXACT_MS
    return statistics.median(later - earlier for earlier, later in pairwise(stamps))


def _sessions(requests: Sequence[TraceRequest], rate_scale: float, draws: random.Random) -> list[TraceRequest]:
    starts = _session_starts(requests)
    mean_gap_ms = (max(starts.values()) - min(starts.values())) / len(starts)
    moved = {session: (start + draws.random() * mean_gap_ms) / rate_scale for session, start in starts.items()}
    return [
        replace(request, arrival_ms=moved[base] + request.arrival_ms - starts[base])
        for request in requests
        for base in (_base(request),)
    ]


def _session_starts(requests: Sequence[TraceRequest]) -> dict[str, float]:
    starts: dict[str, float] = {}
    for request in requests:
        base = _base(request)
        starts[base] = min(starts.get(base, request.arrival_ms), request.arrival_ms)
    return starts


def _base(request: TraceRequest) -> str:
    """The session, without the agent."""
    return request.session.partition("/")[0]
