"""The base of the baselines: one choice for the prefill side, one for the decode side, each made on its own.

That is how the published routers do it: a prefill router and a decode router that know nothing of each other. Where
there is no prefill pool, there is one choice, of the worker that does both. What they share stands here: uncached
tokens, requests on a worker, the cheapest worker with ties broken at random.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

from antiphon_policy.routing import WorkerRole

from antiphon_simulate.policies.draws import draws
from antiphon_simulate.policies.immediate import ImmediatePolicy
from antiphon_simulate.records import Arrival, ClusterView, Placement, TraceRequest, WorkerState

Draws = Iterator[float]


class SidedPolicy(ImmediatePolicy):
    """See the module's docstring."""

    def begin(self, cluster: ClusterView) -> None:
        super().begin(cluster)
        self._prefillers = [state for state in cluster.workers if state.role is WorkerRole.PREFILL]
        self._decoders = [state for state in cluster.workers if state.role is not WorkerRole.PREFILL]

    def place(self, arrival: Arrival, now_ms: float) -> Placement:
        numbers = draws(arrival.draw)
        if not self._prefillers:
            return Placement(decode=self.choose_both(arrival.request, self._decoders, now_ms, numbers).worker_id)
        prefill = self.choose_prefill(arrival.request, self._prefillers, now_ms, numbers)
        decode = self.choose_decode(arrival.request, self._decoders, now_ms, numbers)
        return Placement(decode=decode.worker_id, prefill=prefill.worker_id)

    @abstractmethod
    def choose_prefill(
        self, request: TraceRequest, workers: Sequence[WorkerState], now_ms: float, numbers: Draws
    ) -> WorkerState:
        """Who computes the prompt."""

    @abstractmethod
    def choose_decode(
        self, request: TraceRequest, workers: Sequence[WorkerState], now_ms: float, numbers: Draws
    ) -> WorkerState:
        """Who makes the answer."""

    def choose_both(
        self, request: TraceRequest, workers: Sequence[WorkerState], now_ms: float, numbers: Draws
    ) -> WorkerState:
        """Who does both, where each worker does: as for the prompt, unless a subclass knows better."""
        return self.choose_prefill(request, workers, now_ms, numbers)


def requests_on(worker: WorkerState) -> int:
    """Requests that wait or run there."""
    return worker.queued_requests + worker.running


def uncached_tokens(request: TraceRequest, leading_blocks: int, block_tokens: int) -> int:
    """Prompt tokens to compute where `leading_blocks` are held. At least one: the last token always is."""
    return max(1, request.prompt_tokens - leading_blocks * block_tokens)


def cheapest(workers: Sequence[WorkerState], cost: Callable[[WorkerState], float], numbers: Draws) -> WorkerState:
    """The worker of least cost; among equals each is as likely as the next."""
    costs = [cost(worker) for worker in workers]
    least = min(costs)
    best = [worker for worker, its in zip(workers, costs, strict=True) if its == least]
    return best[int(next(numbers) * len(best))]
