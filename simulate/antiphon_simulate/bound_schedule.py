"""What the schedules of the upper bounds have in common (`bound.py` says what they are and in what sense they bound).

A schedule owns the events and the workers, and decides three things: on which worker an answer goes on, which answers
wait, and, as `bound_chunked.py` and `bound_requests.py` say each for itself, which prompts are in a free worker's next
step.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence

from antiphon_policy.route_records import WorkerRole

from antiphon_simulate.bound_queue import CentralQueue, Part
from antiphon_simulate.bound_worker import Answer, BoundWorker
from antiphon_simulate.events import Events
from antiphon_simulate.records import ClusterShape, Ending, Outcome, Placement, RunResult, Sla, Timing, TraceRequest
from antiphon_simulate.setup import check_sizes, followers_of, roles_of, slower
from antiphon_simulate.worker import HOP_MS


class BoundSchedule(ABC):
    """One run."""

    name: str

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        shape: ClusterShape,
        timing: Timing,
        sla: Sla,
        *,
        window_ms: float,
        block_tokens: int,
    ) -> None:
        self._requests = requests
        self._sla = sla
        self._window_ms = window_ms
        self._events = Events()
        check_sizes(requests, shape, block_tokens)
        self._followers = followers_of(requests)
        self._to_come = len(requests)
        workers = [
            BoundWorker(
                worker_id,
                role,
                slower(timing.step, shape.slow.get(worker_id, 1.0)),
                chunk_tokens=self.chunk_tokens(role, timing),
                max_running=shape.max_running,
            )
            for worker_id, role in roles_of(shape).items()
        ]
        # Asked first: those that only compute prompts, and of them the fastest.
        self._rank = {worker: (worker.decodes, shape.slow.get(worker.worker_id, 1.0)) for worker in workers}
        self._workers = sorted(workers, key=self._rank.__getitem__)
        self._decoders = [worker for worker in self._workers if worker.decodes]
        self._queue = CentralQueue(
            {(worker.step, worker.chunk_tokens) for worker in workers if self._may_prefill(worker)},
            block_tokens=block_tokens,
        )
        self._held: list[tuple[float, int, Answer]] = []
        """Answers that wait, by when they must begin."""
        self._late: list[tuple[float, int, Answer]] = []
        """Answers that wait and are late whatever is done."""
        self._prefilled_on: dict[int, str] = {}
        self._outcomes: list[Outcome] = []
        self._busy_ms: dict[str, defaultdict[int, float]] = {
            worker.worker_id: defaultdict(float) for worker in self._workers
        }

    @staticmethod
    @abstractmethod
    def chunk_tokens(role: WorkerRole, timing: Timing) -> int:
        """The most prompt tokens in one step of such a worker."""

    @abstractmethod
    def _share_out(self, free: Sequence[BoundWorker], now_ms: float) -> Mapping[BoundWorker, Sequence[Part]]:
        """The prompts in the next step of each of these workers, in the order in which they are asked; one that is not
        in it only decodes."""

    @abstractmethod
    def _part_done(self, worker: BoundWorker, part: Part) -> None:
        """A part of a prompt that goes on after it."""

    def _may_prefill(self, worker: BoundWorker) -> bool:
        """Whether prompts ever run there."""
        return True

    def _wants_step(self, worker: BoundWorker) -> bool:
        """Whether one that only decodes might have a prompt in its next step."""
        return self._queue.is_waiting

    def run(self, until_ms: float | None) -> RunResult:
        for request in self._requests:
            if request.after is None:
                self._events.at(request.arrival_ms, self._arrive, request)
        self._events.run(until_ms)
        for worker in self._workers:
            if worker.run is not None:
                self._note_busy(worker, worker.run.start_ms, self._events.now_ms)
        return self._result()

    # -- prompts

    def _arrive(self, request: TraceRequest) -> None:
        now_ms = self._events.now_ms
        outcome = Outcome(request, now_ms)
        self._outcomes.append(outcome)
        self._to_come -= 1
        deadline_ms = now_ms + self._sla.ttft_limit_ms(request.prompt_tokens) - HOP_MS
        self._queue.new_prompt(request, outcome, deadline_ms)
        self._begin_runs()

    def _begin_runs(self) -> None:
        """Every free worker does what there is to do for it; where prompts wait, one that decodes is free after its
        next step."""
        now_ms = self._events.now_ms
        free = [worker for worker in self._workers if worker.run is None]
        # Of equal ones the one that has had the least to do.
        free.sort(key=lambda worker: (*self._rank[worker], worker.busy_ms))
        parts = self._share_out(free, now_ms)
        for worker in free:
            its = parts.get(worker, ())
            for part in its:
                if not part.prompt.has_started:
                    part.prompt.has_started = True
                    part.prompt.outcome.placed_ms = now_ms
            if worker.begin(now_ms, its) is not None:
                self._plan_end(worker)
        for worker in self._decoders:
            if self._wants_step(worker):
                self._interrupt(worker)

    # -- runs

    def _plan_end(self, worker: BoundWorker) -> None:
        assert worker.run is not None
        self._events.at(worker.run.end_ms, self._ends, worker, worker.run)

    def _interrupt(self, worker: BoundWorker) -> None:
        before = worker.run
        worker.interrupt(self._events.now_ms)
        if worker.run is not before:
            self._plan_end(worker)

    def _ends(self, worker: BoundWorker, run: object) -> None:
        """`run`: the one that was to end now; the worker's may have been cut since."""
        if worker.run is not run or worker.run is None:
            return
        its = worker.run
        self._note_busy(worker, its.start_ms, its.end_ms)
        for answer in worker.end():
            self._complete(answer.outcome, worker.worker_id)
        for part in its.parts:
            self._queue.done(part)
            part.prompt.outcome.computed_tokens += part.tokens
            if part.is_last:
                self._prefilled_on[part.prompt.request.index] = worker.worker_id
                self._first_token(part.prompt.outcome)
            else:
                self._part_done(worker, part)
        self._start_answers()
        self._begin_runs()

    # -- answers

    def _first_token(self, outcome: Outcome) -> None:
        now_ms = self._events.now_ms
        request = outcome.request
        outcome.first_token_ms = now_ms + HOP_MS
        more = request.output_tokens - 1
        if more < 1:
            self._complete(outcome, self._decoders[0].worker_id)
            return
        promised_ms = now_ms + more * self._sla.tpot_ms
        answer = Answer(outcome, request.prompt_tokens, request.output_tokens, promised_ms)
        step = self._decoders[0].step
        context = request.prompt_tokens + 1 + more // 2
        alone_ms = more * step.step_ms(new_tokens=1, token_context=context, sequences=1, kv_tokens=context)
        heapq.heappush(self._held, (promised_ms - alone_ms, request.index, answer))

    def _start_answers(self) -> None:
        now_ms = self._events.now_ms
        while self._held and self._held[0][0] < now_ms:
            heapq.heappush(self._late, heapq.heappop(self._held))
        while (line := self._held or self._late) and self._start_answer(line[0][2], now_ms):
            heapq.heappop(line)

    def _start_answer(self, answer: Answer, now_ms: float) -> bool:
        places = [worker for worker in self._decoders if worker.has_place]
        if not places:
            return False
        worker = min(places, key=lambda worker: worker.would_end_ms(answer, now_ms))
        if not worker.keeps_promises_with(answer, now_ms):
            return False
        before = worker.run
        worker.add(answer, now_ms)
        if worker.run is not before:
            self._plan_end(worker)
        return True

    def _complete(self, outcome: Outcome, worker_id: str) -> None:
        request = outcome.request
        outcome.ended_ms = self._events.now_ms + HOP_MS
        outcome.ending = Ending.COMPLETE
        prefilled_on = self._prefilled_on.pop(request.index)
        outcome.placement = Placement(worker_id, None if prefilled_on == worker_id else prefilled_on)
        for follower in self._followers.get(request.index, ()):
            self._events.at(max(follower.arrival_ms, outcome.ended_ms + follower.think_ms), self._arrive, follower)

    # -- figures

    def _note_busy(self, worker: BoundWorker, start_ms: float, end_ms: float) -> None:
        worker.busy_ms += end_ms - start_ms
        windows, width = self._busy_ms[worker.worker_id], self._window_ms
        while start_ms < end_ms:
            at = int(start_ms // width)
            stop_ms = min(end_ms, (at + 1) * width)
            windows[at] += stop_ms - start_ms
            start_ms = stop_ms

    def _result(self) -> RunResult:
        windows = max((at + 1 for busy in self._busy_ms.values() for at in busy), default=0)
        arrivals = [outcome.arrived_ms for outcome in self._outcomes]
        return RunResult(
            policy=self.name,
            outcomes=tuple(sorted(self._outcomes, key=lambda outcome: outcome.request.index)),
            busy_ms={
                worker_id: tuple(busy.get(at, 0.0) for at in range(windows))
                for worker_id, busy in self._busy_ms.items()
            },
            window_ms=self._window_ms,
            span_ms=max(arrivals) - min(arrivals) if arrivals else 0.0,
            sla=self._sla,
        )
