"""The operator's Prometheus metrics. Labels come from closed sets, never from the names of Models.

Requests to the API server are counted by the client itself, in `kube.metrics`.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

_PREFIX = "antiphon_operator"
_MILLISECONDS = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000)
OUTCOMES = ("settled", "changed", "failed", "gone")


class OperatorMetrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.leader = Gauge(f"{_PREFIX}_leader", "1 while this operator holds the Lease and acts", registry=registry)
        self.models = Gauge(f"{_PREFIX}_models", "Models that are watched", registry=registry)
        self.cached_objects = Gauge(f"{_PREFIX}_cached_objects", "Objects in the caches", registry=registry)
        self.queue_depth = Gauge(f"{_PREFIX}_queue_depth", "Models that wait to be looked at", registry=registry)
        self.reconciles = Counter(
            f"{_PREFIX}_reconciles", "Looks at a Model, by how they ended", ("outcome",), registry=registry
        )
        self.reconcile_milliseconds = Histogram(
            f"{_PREFIX}_reconcile_milliseconds",
            "One look at a Model, from assembling to the last write",
            buckets=_MILLISECONDS,
            registry=registry,
        )
        self.plan_milliseconds = Histogram(
            f"{_PREFIX}_plan_milliseconds", "Planning alone", buckets=_MILLISECONDS, registry=registry
        )
        self.hand_edits = Counter(f"{_PREFIX}_hand_edits", "Objects whose hand edits were put back", registry=registry)
        self.ghosts = Counter(
            f"{_PREFIX}_ghosts", "Objects whose deletion no watch told, found by listing", registry=registry
        )
        for outcome in OUTCOMES:
            self.reconciles.labels(outcome)

    def watch(
        self,
        *,
        models: Callable[[], int],
        cached_objects: Callable[[], int],
        queue_depth: Callable[[], int],
    ) -> None:
        """Read these when the page is asked for."""
        self.models.set_function(models)
        self.cached_objects.set_function(cached_objects)
        self.queue_depth.set_function(queue_depth)
