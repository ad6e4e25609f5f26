"""One simulated gateway: its policy, what waits there, and what it knows of the workers.

What it knows is what a real one could: the workers' reports, which all gateways get, and what it has routed itself
since. What other gateways route it learns from the reports alone. Gateways share the index, as each one's mirror is
fed by the same events. To its policy a gateway is the `ClusterView`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from antiphon_policy.routing import WorkerRole
from antiphon_policy.sharing import Kept

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
        tell: Callable[[Gateway, str, Kept], None] | None,
    ) -> None:
        """`workers`: records of its own, which it keeps true. `tell`: a worker is told what is kept back;
        None: there are no other gateways to hear of it."""
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
        self._tell = tell
        self._looks_at_ms = math.inf
        self.kept_back: dict[str, Mapping[str, tuple[Kept, float]]] = {}
        self._books = {state.worker_id: WorkerBook(state) for state in workers}

    # -- ClusterView

    def leading_blocks(self, request: TraceRequest) -> Mapping[str, int]:
        return self._index.leading_blocks(request)

    def evicted(self) -> Sequence[int]:
        return self._index.evicted(self.number)

    @property
    def is_shared(self) -> bool:
        return self._tell is not None

    def tell(self, worker_id: str, kept: Kept) -> None:
        if self._tell is not None:
            self._tell(self, worker_id, kept)

    def look_at(self, time_ms: float) -> None:
        if time_ms < self._looks_at_ms:
            self._looks_at_ms = time_ms
            self._events.at(time_ms, self._look, time_ms)

    def _look(self, time_ms: float) -> None:
        # One that was asked for earlier has taken its place else.
        if time_ms == self._looks_at_ms:
            self._looks_at_ms = math.inf
            self._dispatch()

    # -- what happens

    def arrive(self, outcome: Outcome, draw: float) -> None:
        """A request comes in."""
        self.waiting[outcome.request.index] = outcome
        self.policy.arrived(Arrival(outcome.request, outcome.arrived_ms, draw))
        self._dispatch()

    def reported(
        self,
        worker_id: str,
        figures: Figures,
        received: int,
        ended: Sequence[Job],
        kept_back: Mapping[str, tuple[Kept, float]],
        freed: bool,
    ) -> None:
        """A worker's report. `received`: how many of this gateway's requests are counted in it; `ended`: those that
        this gateway sent; `kept_back`: what gateways have told it, by their numbers."""
        self._books[worker_id].report(figures, received)
        for job in ended:
            self._index.forget_request(job.outcome.request)
            self.policy.ended(job.outcome.request, job.placement, self._events.now_ms)
        if freed or kept_back != self.kept_back.get(worker_id, {}):
            self.kept_back[worker_id] = kept_back
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
