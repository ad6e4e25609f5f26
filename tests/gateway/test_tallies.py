"""What the gateway counts by itself is told as prometheus_client would tell it."""

from __future__ import annotations

import re

from antiphon_gateway.tallies import Counts, Spreads
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

BOUNDS = (0.005, 0.1, 1.0, 30.0)


def page(registry: CollectorRegistry) -> str:
    """Without the times at which series began."""
    return re.sub(r"(_created\S*) .*", r"\1", generate_latest(registry).decode())


def test_a_page_says_the_same_as_the_librarys_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own_counts = Counts("requests", "Requests", ("model", "status"), ours)
    own_spreads = Spreads("wait_seconds", "Waiting", ("model",), BOUNDS, ours)
    counter = Counter("requests", "Requests", ("model", "status"), registry=theirs)
    histogram = Histogram("wait_seconds", "Waiting", ("model",), buckets=BOUNDS, registry=theirs)
    assert page(ours) == page(theirs), "with no series yet"
    for model, status, by in (("a", "200", 1), ("b", "429", 3), ("a", "200", 4)):
        own_counts.labels(model, status).inc(by)
        counter.labels(model, status).inc(by)
    for value in (0.0, 0.005, 0.0051, 0.1, 1.0, 7.0, 30.0, 30.1):
        own_spreads.labels("a").observe(value)
        histogram.labels("a").observe(value)
    assert 'wait_seconds_bucket{le="+Inf",model="a"} 8.0' in page(ours)
    assert page(ours) == page(theirs)
