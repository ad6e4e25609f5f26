"""The simulated cluster: requests arrive, the policy places them, workers compute, the gateway hears of it later.

`simulate` is the way in. The cluster owns the events, the workers, the index and what the gateway knows; the policy
sees of it what `ClusterView` says and nothing else. Two things happen late, as they do in reality: the index hears of
blocks `index_delay_ms` after they were stored or removed, and the gateway of a worker's load `report_delay_ms` after
the step that changed it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from antiphon_policy.routing import WorkerRole

from antiphon_simulate.events import Events
from antiphon_simulate.gateway_book import Figures, WorkerBook
from antiphon_simulate.index import Index
from antiphon_simulate.job import Job
from antiphon_simulate.records import (
    Arrival,
    ClusterShape,
    Ending,
    Outcome,
    Placement,
    Policy,
    RunResult,
    Schedule,
    Sla,
    Timing,
    TraceRequest,
    WorkerState,
)
from antiphon_simulate.setup import WorkloadError, check_sizes, followers_of, roles_of, slower
from antiphon_simulate.worker import Worker

__all__ = [
    "BLOCK_TOKENS",
    "Cluster",
    "Delays",
    "PlacementError",
    "StalledError",
    "WorkloadError",
    "followers_of",
    "roles_of",
    "simulate",
    "slower",
]

BLOCK_TOKENS = 512
"""Of the traces, where their files say nothing else."""


class PlacementError(ValueError):
    """A policy named a worker that cannot do it, or a request that does not wait."""


class StalledError(RuntimeError):
    """Nothing runs, but the policy keeps requests back."""


@dataclass(frozen=True, slots=True)
class Delays:
    index_ms: float = 20.0
    report_ms: float = 2.0


def simulate(
    requests: Sequence[TraceRequest],
    shape: ClusterShape,
    timing: Timing,
    policy: Policy | Schedule,
    sla: Sla,
    *,
    seed: int,
    index_delay_ms: float = 20.0,
    report_delay_ms: float = 2.0,
    window_ms: float = 60_000.0,
    until_ms: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> RunResult:
    """One policy on one workload; the same arguments give the same result.

    `seed`: of the draws that policies get. `until_ms`: the run is cut then, and what has not ended is UNFINISHED;
    requests that have not arrived by then have no outcome. `progress(ended, requests)`: called now and then.
    Raises WorkloadError, PlacementError, StalledError.
    """
    if isinstance(policy, Schedule):
        return policy.run(
            requests, shape, timing, sla, window_ms=window_ms, until_ms=until_ms, block_tokens=block_tokens
        )
    cluster = Cluster(
        requests,
        shape,
        timing,
        policy,
        sla,
        seed=seed,
        delays=Delays(index_delay_ms, report_delay_ms),
        window_ms=window_ms,
        progress=progress,
        block_tokens=block_tokens,
    )
    return cluster.run(until_ms)


class Cluster:
    """One run. To its policy it is the `ClusterView`, to its workers the `Observer`."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        shape: ClusterShape,
        timing: Timing,
        policy: Policy,
        sla: Sla,
        *,
        seed: int = 0,
        delays: Delays = Delays(),
        window_ms: float = 60_000.0,
        progress: Callable[[int, int], None] | None = None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.timing = timing
        self.sla = sla
        self.block_tokens = block_tokens
        self._requests = requests
        self._policy = policy
        self._draws = random.Random(seed)
        self._delays = delays
        self._window_ms = window_ms
        self._progress = progress
        self._events = Events()
        roles = roles_of(shape)
        self._index = Index(self._events, delays.index_ms, block_tokens, len(roles) * shape.pool_blocks)
        self._workers: dict[str, Worker] = {}
        self._books: dict[str, WorkerBook] = {}
        for worker_id, role in roles.items():
            step = slower(timing.step, shape.slow.get(worker_id, 1.0))
            self._workers[worker_id] = Worker(
                worker_id,
                step,
                timing,
                pool_blocks=shape.pool_blocks,
                block_tokens=block_tokens,
                chunk_tokens=timing.chunk_tokens if role is WorkerRole.PREFILL else timing.mixed_chunk_tokens,
                max_running=shape.max_running,
                events=self._events,
                observer=self,
            )
            self._books[worker_id] = WorkerBook(WorkerState(worker_id, role, step, shape.pool_blocks))
            self._index.add_worker(worker_id)
        self.workers: Sequence[WorkerState] = tuple(book.state for book in self._books.values())
        self._waiting: dict[int, Outcome] = {}
        """Arrived and not placed yet, by the request's index."""
        self._outcomes: list[Outcome] = []
        self._ended = 0
        self._unreported: defaultdict[str, list[Job]] = defaultdict(list)
        """Of each decode worker, jobs that have ended since its last report."""
        self._busy_ms: dict[str, defaultdict[int, float]] = {worker_id: defaultdict(float) for worker_id in roles}
        self._followers = followers_of(requests)
        check_sizes(requests, shape, block_tokens)

    def run(self, until_ms: float | None = None) -> RunResult:
        self._policy.begin(self)
        for request in self._requests:
            if request.after is None:
                self._events.at(request.arrival_ms, self._arrive, request)
        if self._events.run(until_ms):
            if self._waiting:
                raise StalledError(
                    f"policy {self._policy.name} keeps {len(self._waiting)} requests back though nothing runs: "
                    "with idle workers, dispatch must place something"
                )
            for worker in self._workers.values():
                worker.check_idle()
        else:
            for worker in self._workers.values():
                worker.cut(self._events.now_ms)
        return self._result()

    def check_integrity(self) -> None:
        """After a run to the end: every pool's books add up, nothing is left over, and the mirror equals the pools.
        Raises AssertionError."""
        chains = [request.blocks[: request.prompt_tokens // self.block_tokens] for request in self._requests]
        for worker_id, worker in self._workers.items():
            worker.pool.check_idle(chains)
            held = {self._index.hash_of(block) for chain in chains for block in chain if block in worker.pool}
            assert held == self._index.contents(worker_id), f"the mirror does not know what {worker_id} holds"

    # -- ClusterView

    def leading_blocks(self, request: TraceRequest) -> Mapping[str, int]:
        return self._index.leading_blocks(request)

    def evicted(self) -> Sequence[int]:
        return self._index.evicted()

    # -- Observer

    def busy(self, worker: Worker, start_ms: float, end_ms: float) -> None:
        windows, width = self._busy_ms[worker.worker_id], self._window_ms
        at = int(start_ms // width)
        while end_ms > (at + 1) * width:
            windows[at] += (at + 1) * width - start_ms
            at += 1
            start_ms = at * width
        windows[at] += end_ms - start_ms

    def ended(self, job: Job) -> None:
        job.outcome.ending = Ending.COMPLETE
        self._unreported[job.answer_on.worker_id].append(job)
        for request in self._followers.get(job.outcome.request.index, ()):
            self._events.at(max(request.arrival_ms, job.outcome.ended_ms + request.think_ms), self._arrive, request)
        self._ended += 1
        if self._progress is not None and self._ended % 100 == 0:
            self._progress(self._ended, len(self._requests))

    def changed(self, worker: Worker, *, freed: bool) -> None:
        self._index.publish(worker.worker_id, worker.pool)
        ended = self._unreported.pop(worker.worker_id, ())
        time_ms = self._events.now_ms + self._delays.report_ms
        self._events.at(time_ms, self._reported, worker.worker_id, worker.figures(), worker.received, ended, freed)

    # -- what happens

    def _arrive(self, request: TraceRequest) -> None:
        now_ms = self._events.now_ms
        outcome = self._waiting[request.index] = Outcome(request, now_ms)
        self._outcomes.append(outcome)
        self._policy.arrived(Arrival(request, now_ms, self._draws.random()))
        self._dispatch()

    def _reported(self, worker_id: str, figures: Figures, received: int, ended: Sequence[Job], freed: bool) -> None:
        self._books[worker_id].report(figures, received)
        for job in ended:
            self._index.forget_request(job.outcome.request)
            self._policy.ended(job.outcome.request, job.placement, self._events.now_ms)
        if freed:
            self._dispatch()

    def _dispatch(self) -> None:
        if self._waiting:
            for request, placement in self._policy.dispatch(self._events.now_ms):
                self._place(request, placement)

    def _place(self, request: TraceRequest, placement: Placement) -> None:
        outcome = self._waiting.pop(request.index, None)
        if outcome is None:
            raise PlacementError(f"policy {self._policy.name} placed request {request.index}, which does not wait")
        outcome.placement = placement
        outcome.placed_ms = self._events.now_ms
        answer_on = self._named(placement.decode, prefills=False)
        prompt_on = answer_on
        if placement.prefill is not None and placement.prefill != placement.decode:
            prompt_on = self._named(placement.prefill, prefills=True)
        pull_from = self._workers[placement.pull_from] if placement.pull_from else None
        job = Job(
            outcome,
            placement,
            block_tokens=self.block_tokens,
            prompt_on=prompt_on,
            answer_on=answer_on,
            pull_from=pull_from,
        )
        self._pledge(job)
        prompt_on.take(job)
        if not job.is_local:
            answer_on.take(job)
        self._index.publish(prompt_on.worker_id, prompt_on.pool)
        self._index.publish(answer_on.worker_id, answer_on.pool)

    def _pledge(self, job: Job) -> None:
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

    def _named(self, worker_id: str, *, prefills: bool) -> Worker:
        book = self._books.get(worker_id)
        if book is None or (book.state.role is WorkerRole.PREFILL) is not prefills:
            role = "prefill" if prefills else "decode"
            raise PlacementError(f"policy {self._policy.name} named {worker_id!r} as a {role} worker: it is none")
        return self._workers[worker_id]

    def _result(self) -> RunResult:
        windows = max((at + 1 for busy in self._busy_ms.values() for at in busy), default=0)
        arrivals = [outcome.arrived_ms for outcome in self._outcomes]
        return RunResult(
            policy=self._policy.name,
            outcomes=tuple(sorted(self._outcomes, key=lambda outcome: outcome.request.index)),
            busy_ms={
                worker_id: tuple(busy.get(at, 0.0) for at in range(windows))
                for worker_id, busy in self._busy_ms.items()
            },
            window_ms=self._window_ms,
            span_ms=max(arrivals) - min(arrivals) if arrivals else 0.0,
            sla=self.sla,
        )
