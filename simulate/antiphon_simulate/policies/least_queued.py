"""Least queued (also: least requests, join the shortest queue): the worker with the fewest requests on it.

    load(w) = requests waiting on w + requests running on w            (requests; the least wins)

Source: join-the-shortest-queue (Winston, "Optimality of the shortest line discipline", 1977); the `least_load` or
`least_request` policy of most LLM routers. No setting. Each side chooses by its own load. Equal loads: at random,
where several routers take the first of their list.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon_simulate.policies.sided import Draws, SidedPolicy, cheapest, requests_on
from antiphon_simulate.records import TraceRequest, WorkerState


class LeastQueuedPolicy(SidedPolicy):
    name = "least_queued"

    def choose_prefill(
        self, request: TraceRequest, workers: Sequence[WorkerState], now_ms: float, numbers: Draws
    ) -> WorkerState:
        return cheapest(workers, requests_on, numbers)

    def choose_decode(
        self, request: TraceRequest, workers: Sequence[WorkerState], now_ms: float, numbers: Draws
    ) -> WorkerState:
        return cheapest(workers, requests_on, numbers)
