"""One simulated gateway: its policy, what waits there, and what it knows of the workers.

What it knows is what a real one could: the workers' reports, which all gateways get, and what it has routed itself
since. What other gateways route it learns from the reports alone. Gateways share the index, as each one's mirror is
fed by the same events. To its policy a gateway is the `ClusterView`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from antiphon_policy.routing import WorkerRole

from antiphon_simulate.events import Events
from antiphon_simulate.gateway_book import Figures, WorkerBook
from antiphon_simulate.index import Index
from antiphon_simulate.job import Job
from antiphon_simulate.records import Arrival, Outcome, Placement, Policy, Sla, Timing, TraceRequest, WorkerState


class PlacementError(ValueError):
    """A policy named a worker that cannot do it, or a request that does not wait."""


class Gateway:
    """The cluster tells it what happens; `start` is the cluster's way to put a placement on the workers."""

    def __init__(
        self,
        number: int,
        policy: Policy,
        workers: Sequence[WorkerState],
        timing: Timing,
        sla: Sla,
        *,
        block_tokens: int,
        events: Events,
        index: Index,
        start: Callable[[Gateway, Outcome, Placement], None],
    ) -> None:
        """`workers`: records of its own, which it keeps true."""
        self.number = number
        self.policy = policy
        self.workers = workers
        self.timing = timing
        self.sla = sla
        self.block_tokens = block_tokens
        self.waiting: dict[int, Outcome] = {}
        """Arrived and not placed yet, by the request's index."""
        self._events = events
        self._index = index
        self._start = start
        self._books = {state.worker_id: WorkerBook(state) for state in workers}

    # -- ClusterView

    def leading_blocks(self, request: TraceRequest) -> Mapping[str, int]:
        return self._index.leading_blocks(request)

    def evicted(self) -> Sequence[int]:
        return self._index.evicted(self.number)

    # -- what happens

    def arrive(self, outcome: Outcome, draw: float) -> None:
        """A request comes in."""
        self.waiting[outcome.request.index] = outcome
        self.policy.arrived(Arrival(outcome.request, outcome.arrived_ms, draw))
        self._dispatch()

    def reported(self, worker_id: str, figures: Figures, received: int, ended: Sequence[Job], freed: bool) -> None:
        """A worker's report. `received`: how many of this gateway's requests are counted in it; `ended`: those that
        this gateway sent."""
        self._books[worker_id].report(figures, received)
        for job in ended:
            self._index.forget_request(job.outcome.request)
            self.policy.ended(job.outcome.request, job.placement, self._events.now_ms)
        if freed:
            self._dispatch()

    def pledge(self, job: Job) -> None:
        """Counted at once, by what the mirror says is cached."""
        held = self._index.leading_blocks(job.outcome.request)
        prompt_on, answer_on = job.prompt_on.worker_id, job.answer_on.worker_id
        cached = held.get(prompt_on, 0)
        if job.pull_from is not None:
            cached = max(cached, held.get(job.pull_from.worker_id, 0))
        uncached = job.prompt_tokens - min(cached * self.block_tokens, job.prompt_tokens - 1)
        if job.is_local:
            blocks = job.answer_blocks - held.get(prompt_on, 0)
            self._books[prompt_on].pledge(Figures(uncached, 1, 0, 0, blocks))
        else:
            self._books[prompt_on].pledge(Figures(uncached, 1, 0, 0, job.prompt_blocks - held.get(prompt_on, 0)))
            blocks = job.answer_blocks - held.get(answer_on, 0)
            self._books[answer_on].pledge(Figures(0, 0, 1, job.prompt_tokens, blocks))

    def check_named(self, worker_id: str, *, prefills: bool) -> None:
        """Raises PlacementError unless there is such a worker and it is of that role."""
        book = self._books.get(worker_id)
        if book is None or (book.state.role is WorkerRole.PREFILL) is not prefills:
            role = "prefill" if prefills else "decode"
            raise PlacementError(f"policy {self.policy.name} named {worker_id!r} as a {role} worker: it is none")

    def _dispatch(self) -> None:
        if self.waiting:
            for request, placement in self.policy.dispatch(self._events.now_ms):
                outcome = self.waiting.pop(request.index, None)
                if outcome is None:
                    raise PlacementError(
                        f"policy {self.policy.name} placed request {request.index}, which does not wait"
                    )
                self._start(self, outcome, placement)
