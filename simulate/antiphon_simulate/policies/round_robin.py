"""Round robin: the next prefill worker and the next decode worker, each in turn. Sees neither cache nor load."""

from __future__ import annotations

from itertools import cycle

from antiphon_policy.routing import WorkerRole

from antiphon_simulate.policies.immediate import ImmediatePolicy
from antiphon_simulate.records import Arrival, ClusterView, Placement


class RoundRobinPolicy(ImmediatePolicy):
    name = "round_robin"

    def begin(self, cluster: ClusterView) -> None:
        super().begin(cluster)
        prefillers = [state.worker_id for state in cluster.workers if state.role is WorkerRole.PREFILL]
        # Where there is no prefill pool, the worker that decodes computes the prompt too.
        self._prefillers = cycle(prefillers or [None])
        self._decoders = cycle(state.worker_id for state in cluster.workers if state.role is not WorkerRole.PREFILL)

    def place(self, arrival: Arrival, now_ms: float) -> Placement:
        return Placement(decode=next(self._decoders), prefill=next(self._prefillers))
