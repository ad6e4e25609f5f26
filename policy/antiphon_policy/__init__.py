"""Decisions as pure functions over plain records: the latency model, and routing by it. No I/O."""

from antiphon_policy.equals import Fitted, pooled, shared
from antiphon_policy.latency import InputRange, StepModel, StepModelFit, transfer_ms
from antiphon_policy.routing import (
    CostParts,
    NoWorker,
    NoWorkerReason,
    RouteDecision,
    RouteOption,
    RouteReason,
    RouteRequest,
    RoutingSnapshot,
    WorkerRole,
    WorkerView,
    Workload,
    route,
)

__all__ = [
    "CostParts",
    "Fitted",
    "InputRange",
    "NoWorker",
    "NoWorkerReason",
    "RouteDecision",
    "RouteOption",
    "RouteReason",
    "RouteRequest",
    "RoutingSnapshot",
    "StepModel",
    "StepModelFit",
    "WorkerRole",
    "WorkerView",
    "Workload",
    "pooled",
    "route",
    "shared",
    "transfer_ms",
]
