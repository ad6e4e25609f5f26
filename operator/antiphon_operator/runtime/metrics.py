"""The operator's Prometheus metrics. Labels come from closed sets, never from the names of Models.

Requests to the API server are counted by the client itself, in `kube.metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from antiphon_policy.scaling import ScalingAction, ScalingDecision
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from antiphon_operator.names import ROLES
from antiphon_operator.plan.observed import AutoscalerView

_PREFIX = "antiphon_operator"
_MILLISECONDS = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000)
OUTCOMES = ("settled", "changed", "failed", "gone")


class ScalingMetrics:
    """Of the autoscaler, over all Models. How one of them fares stands in its status and on the gateways' pages."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.decisions = Counter(
            f"{_PREFIX}_scaling_decisions", "Decisions of the scaling law, by action", ("action",), registry=registry
        )
        self.decide_milliseconds = Histogram(
            f"{_PREFIX}_scaling_decide_milliseconds",
            "One decision of the scaling law, on its thread",
            buckets=_MILLISECONDS,
            registry=registry,
        )
        self.recommended = Gauge(
            f"{_PREFIX}_recommended_replicas",
            "Replicas that the autoscaler wants, by role",
            ("role",),
            registry=registry,
        )
        self.attainment = Gauge(
            f"{_PREFIX}_least_attainment",
            "Of the Models with measured requests, the least share that was served inside the promise; 1 without any",
            registry=registry,
        )
        self.silent = Gauge(
            f"{_PREFIX}_scaling_silent_models", "Models of which no gateway tells anything", registry=registry
        )
        self.limited = Gauge(
            f"{_PREFIX}_scaling_limited_models", "Models that need more than bounds and budget allow", registry=registry
        )
        for action in ScalingAction:
            self.decisions.labels(action.value)
        self.told([])

    def decided(self, decision: ScalingDecision, took_s: float) -> None:
        self.decisions.labels(decision.action.value).inc()
        self.decide_milliseconds.observe(took_s * 1e3)

    def told(self, views: Iterable[AutoscalerView]) -> None:
        """What stands after a round over all Models."""
        views = list(views)
        for role in ROLES:
            self.recommended.labels(role).set(sum(view.sizes.get(role, 0) for view in views))
        self.attainment.set(min((view.attainment for view in views if view.attainment is not None), default=1.0))
        self.silent.set(sum(view.silent for view in views))
        self.limited.set(sum(view.limit is not None for view in views))


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
        self.scaling = ScalingMetrics(registry)
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
