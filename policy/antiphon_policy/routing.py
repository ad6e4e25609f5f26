"""Where a request goes: which decode worker D, and who computes its prompt (a prefill worker P, or D itself).

A pure function of a snapshot, a request and a random number: the same inputs give the same decision, with its reason.
Everything is priced in milliseconds by the workers' own latency models, so cache, load, links and memory weigh
against each other with no weights for a person to tune:

    cost(D, P) = hop + queue + pull + compute   the request's own time to first token, on P (on D where P is none)
               + transfer + join + stream       its wait for the second token, and its further tokens on D
               + delay                          what it adds to the requests that run on D and that will queue behind it
               + recompute                      the computing that it causes by pushing blocks out

The cheapest pair that keeps the SLA wins (without an SLA: the cheapest); of near ties the less loaded of two random
picks. Each term's formula stands at its function in `pricing`; `worker_table` narrows a thousand workers down to the
few that are worth pricing as pairs. The caller counts what it routed at once, so that a burst spreads.
"""

from __future__ import annotations

from antiphon_policy.route_records import (
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
)

__all__ = [
    "CostParts",
    "NoWorker",
    "NoWorkerReason",
    "RouteDecision",
    "RouteOption",
    "RouteReason",
    "RouteRequest",
    "RoutingSnapshot",
    "WorkerRole",
    "WorkerView",
    "Workload",
    "route",
]


def route(snapshot: RoutingSnapshot, request: RouteRequest, tie_break: float) -> RouteDecision:
    """Choose. `tie_break` in [0, 1) is the only randomness. Raises NoWorker.

    Who routes often keeps a `WorkerTable` and asks that: it is what this makes of the snapshot.
    """
    # Not at the top: who only needs the records (the operator, the simulator's traces) needs no numpy.
    from antiphon_policy.worker_table import WorkerTable

    table = WorkerTable(snapshot.link_gigabytes_per_s, snapshot.workload)
    for view in snapshot.workers:
        table.put(view)
    leading = {view.worker_id: view.leading_blocks for view in snapshot.workers if view.leading_blocks}
    return table.choose(request, leading, tie_break)
