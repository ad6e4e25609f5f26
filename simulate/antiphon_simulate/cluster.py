"""The simulated cluster: requests arrive, the policy places them, workers compute, the gateway hears of it later.

`simulate` is the way in. The cluster owns the events, the workers, the index and the gateways; a policy sees what its
gateway knows (`ClusterView`) and nothing else. Two things happen late, as they do in reality: the index hears of
blocks `index_delay_ms` after they were stored or removed, and the gateway of a worker's load `report_delay_ms` after
the step that changed it.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from antiphon_policy.routing import WorkerRole
from antiphon_policy.sharing import Kept

from antiphon_simulate.events import Events
from antiphon_simulate.gateway import Gateway, PlacementError
from antiphon_simulate.index import Index
from antiphon_simulate.job import Job
from antiphon_simulate.records import (
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

NEWS_MS = 30.0
"""So long after something came to a worker all gateways are told, if no step has ended before: as real workers do."""

TELL_MS = 1.0
"""From a gateway to a worker."""

BLOCK_TOKENS = 512
"""Of the traces, where their files say nothing else."""


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
    gateways: int = 1,
) -> RunResult:
    """One policy on one workload; the same arguments give the same result.

    `seed`: of the draws that policies get. `until_ms`: the run is cut then, and what has not ended is UNFINISHED;
    requests that have not arrived by then have no outcome. `progress(ended, requests)`: called now and then.
    `gateways`: each request comes to one of so many at random, and each of them has a copy of the policy and knows what
    it has routed itself and what workers report. (A `Schedule` has none.)
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
        gateways=gateways,
    )
    return cluster.run(until_ms)


class Cluster:
    """One run. To its workers it is the `Observer`."""

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
        gateways: int = 1,
    ) -> None:
        self._sla = sla
        self._block_tokens = block_tokens
        self._requests = requests
        self._draws = random.Random(seed)
        self._entries = random.Random(f"{seed} gateways")
        self._orders = random.Random(f"{seed} reports")
        self._delays = delays
        self._window_ms = window_ms
        self._progress = progress
        self._events = Events()
        roles = roles_of(shape)
        self._index = Index(self._events, delays.index_ms, block_tokens, len(roles) * shape.pool_blocks, gateways)
        self._workers: dict[str, Worker] = {}
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
            self._index.add_worker(worker_id)
        # A policy that has not begun knows nothing: a copy of it is a new one.
        policies = [policy, *(copy.deepcopy(policy) for _ in range(gateways - 1))]
        self.gateways = [
            Gateway(
                number,
                its,
                [
                    WorkerState(worker.worker_id, roles[worker.worker_id], worker.step, shape.pool_blocks)
                    for worker in self._workers.values()
                ],
                timing,
                sla,
                block_tokens=block_tokens,
                events=self._events,
                index=self._index,
                start=self._start,
                tell=self._tell if gateways > 1 else None,
            )
            for number, its in enumerate(policies)
        ]
        self._outcomes: list[Outcome] = []
        self._ended = 0
        self._unreported: defaultdict[str, list[Job]] = defaultdict(list)
        """Of each decode worker, jobs that have ended since its last report."""
        self._busy_ms: dict[str, defaultdict[int, float]] = {worker_id: defaultdict(float) for worker_id in roles}
        self._followers = followers_of(requests)
        check_sizes(requests, shape, block_tokens)

    def run(self, until_ms: float | None = None) -> RunResult:
        for gateway in self.gateways:
            gateway.policy.begin(gateway)
        for request in self._requests:
            if request.after is None:
                self._events.at(request.arrival_ms, self._arrive, request)
        if self._events.run(until_ms):
            for gateway in self.gateways:
                if gateway.waiting:
                    raise StalledError(
                        f"policy {gateway.policy.name} keeps {len(gateway.waiting)} requests back though nothing runs: "
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
        chains = [request.blocks[: request.prompt_tokens // self._block_tokens] for request in self._requests]
        for worker_id, worker in self._workers.items():
            worker.pool.check_idle(chains)
            held = {self._index.hash_of(block) for chain in chains for block in chain if block in worker.pool}
            assert held == self._index.contents(worker_id), f"the mirror does not know what {worker_id} holds"

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
        worker.reported_ms, kept_back = self._events.now_ms, dict(worker.kept_back)
        time_ms, figures = self._events.now_ms + self._delays.report_ms, worker.figures()
        # A report reaches nobody first every time.
        for gateway in self._orders.sample(self.gateways, len(self.gateways)):
            its = [job for job in ended if job.gateway == gateway.number]
            received = worker.received[gateway.number]
            self._events.at(time_ms, gateway.reported, worker.worker_id, figures, received, its, kept_back, freed)

    # -- what happens

    def _arrive(self, request: TraceRequest) -> None:
        outcome = Outcome(request, self._events.now_ms)
        self._outcomes.append(outcome)
        self._entries.choice(self.gateways).arrive(outcome, self._draws.random())

    def _start(self, gateway: Gateway, outcome: Outcome, placement: Placement) -> None:
        outcome.placement = placement
        outcome.placed_ms = self._events.now_ms
        gateway.check_named(placement.decode, prefills=False)
        answer_on = prompt_on = self._workers[placement.decode]
        if placement.prefill is not None and placement.prefill != placement.decode:
            gateway.check_named(placement.prefill, prefills=True)
            prompt_on = self._workers[placement.prefill]
        job = Job(
            outcome,
            placement,
            gateway=gateway.number,
            block_tokens=self._block_tokens,
            prompt_on=prompt_on,
            answer_on=answer_on,
            pull_from=self._workers[placement.pull_from] if placement.pull_from else None,
        )
        gateway.pledge(job)
        prompt_on.take(job)
        if not job.is_local:
            answer_on.take(job)
        self._index.publish(prompt_on.worker_id, prompt_on.pool)
        self._index.publish(answer_on.worker_id, answer_on.pool)
        if len(self.gateways) > 1:  # one alone knows what it has sent
            self._events.at(self._events.now_ms + NEWS_MS, self._tell_others, job)

    def _tell(self, gateway: Gateway, worker_id: str, kept: Kept) -> None:
        self._events.at(
            self._events.now_ms + TELL_MS,
            self._told,
            self._workers[worker_id],
            gateway.number,
            kept,
            self._events.now_ms,
        )

    def _told(self, worker: Worker, gateway: int, kept: Kept, said_ms: float) -> None:
        worker.kept_back[str(gateway)] = (kept, said_ms)
        self._events.at(self._events.now_ms + NEWS_MS, self._give_news, worker, said_ms)

    def _give_news(self, worker: Worker, said_ms: float) -> None:
        if worker.reported_ms < said_ms + TELL_MS:
            self.changed(worker, freed=False)

    def _tell_others(self, job: Job) -> None:
        self.changed(job.prompt_on, freed=False)
        if not job.is_local:
            self.changed(job.answer_on, freed=False)

    def _result(self) -> RunResult:
        windows = max((at + 1 for busy in self._busy_ms.values() for at in busy), default=0)
        arrivals = [outcome.arrived_ms for outcome in self._outcomes]
        return RunResult(
            policy=self.gateways[0].policy.name,
            outcomes=tuple(sorted(self._outcomes, key=lambda outcome: outcome.request.index)),
            busy_ms={
                worker_id: tuple(busy.get(at, 0.0) for at in range(windows))
                for worker_id, busy in self._busy_ms.items()
            },
            window_ms=self._window_ms,
            span_ms=max(arrivals) - min(arrivals) if arrivals else 0.0,
            sla=self._sla,
        )
