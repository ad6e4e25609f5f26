"""One schedule of the upper bound (`bound.py` says what it is and in what sense it bounds).

It owns the events and the workers, and decides three things: which parts of prompts a free worker's next step has, on
which worker an answer goes on, and which answers wait.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence

from antiphon_simulate.bound_queue import CentralQueue, Part
from antiphon_simulate.bound_worker import Answer, BoundWorker
from antiphon_simulate.events import Events
from antiphon_simulate.records import ClusterShape, Ending, Outcome, Placement, RunResult, Sla, Timing, TraceRequest
from antiphon_simulate.setup import check_sizes, followers_of, roles_of, slower
from antiphon_simulate.worker import HOP_MS

NAME = "bound"

_LEAST_SHARE = 1 / 16
"""Of a whole chunk: what a part beside answers has at least, unless the prompt ends with it."""


class BoundSchedule:
    """One run."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        shape: ClusterShape,
        timing: Timing,
        sla: Sla,
        *,
        longest_ms: float,
        window_ms: float,
        block_tokens: int,
    ) -> None:
        self._requests = requests
        self._sla = sla
        self._longest_ms = longest_ms
        """Of a step with prompts on a worker that decodes, for the sake of answers that come meanwhile."""
        self._window_ms = window_ms
        self._events = Events()
        self._least_tokens = math.ceil(timing.chunk_tokens * _LEAST_SHARE)
        check_sizes(requests, shape, block_tokens)
        self._followers = followers_of(requests)
        workers = [
            BoundWorker(
                worker_id,
                role,
                slower(timing.step, shape.slow.get(worker_id, 1.0)),
                chunk_tokens=timing.chunk_tokens,
                max_running=shape.max_running,
            )
            for worker_id, role in roles_of(shape).items()
        ]
        # Asked first: those that only compute prompts, and of them the fastest.
        self._rank = {worker: (worker.decodes, shape.slow.get(worker.worker_id, 1.0)) for worker in workers}
        self._workers = sorted(workers, key=self._rank.__getitem__)
        self._decoders = [worker for worker in self._workers if worker.decodes]
        fastest = slower(timing.step, min(shape.slow.get(worker.worker_id, 1.0) for worker in workers))
        self._queue = CentralQueue(fastest, chunk_tokens=timing.chunk_tokens, block_tokens=block_tokens)
        self._held: list[tuple[float, int, Answer]] = []
        """Answers that wait, by when they must begin."""
        self._late: list[tuple[float, int, Answer]] = []
        """Answers that wait and are late whatever is done."""
        self._prefilled_on: dict[int, str] = {}
        self._outcomes: list[Outcome] = []
        self._busy_ms: dict[str, defaultdict[int, float]] = {
            worker.worker_id: defaultdict(float) for worker in self._workers
        }

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
        if self._queue.is_waiting:
            for worker in self._decoders:
                self._interrupt(worker)

    def _share_out(self, free: Sequence[BoundWorker], now_ms: float) -> dict[BoundWorker, list[Part]]:
        """One prompt for each free worker; where prompts are left then, steps are filled up."""
        limits = {worker: self._longest_step_ms(worker, now_ms) for worker in free}
        parts = {worker: [part] for worker in free if (part := self._take(worker, limits[worker], now_ms)) is not None}
        for worker, its in parts.items():
            left = worker.budget_tokens() - its[0].tokens
            while left > 0 and (part := self._queue.take(now_ms, left)) is not None:
                step_ms = worker.mixed_step_ms([*its, part])
                if step_ms > limits[worker] or self._makes_late(worker, its, now_ms, step_ms):
                    self._queue.put_back(part)
                    break
                its.append(part)
                left -= part.tokens
        return parts

    def _longest_step_ms(self, worker: BoundWorker, now_ms: float) -> float:
        """With prompts in it. One that decodes breaks no promise that it keeps without them."""
        if not worker.decodes:
            return math.inf
        return min(self._longest_ms, worker.mixed_step_ms(()) + worker.spare_ms(now_ms))

    def _take(self, worker: BoundWorker, longest_ms: float, now_ms: float) -> Part | None:
        """The next part for a worker. Not a small part beside answers: a prompt that crawls here would be done sooner
        elsewhere."""
        part = self._queue.take(now_ms, worker.budget_tokens())
        if part is None or (step_ms := worker.mixed_step_ms([part])) <= longest_ms:
            return part
        self._queue.put_back(part)
        per_token_ms = worker.step.per_new_token_ms + worker.step.per_token_context_ms * part.end_tokens
        tokens = part.tokens - math.ceil((step_ms - longest_ms) / per_token_ms) if per_token_ms > 0.0 else 0
        if tokens < self._least_tokens:
            if worker.has_answers:
                return None
            tokens = self._least_tokens
        return self._queue.take(now_ms, tokens)

    @staticmethod
    def _makes_late(worker: BoundWorker, parts: Sequence[Part], now_ms: float, step_ms: float) -> bool:
        """Whether a prompt that is complete in time after a step with these parts is not after one of `step_ms`."""
        before_ms, after_ms = now_ms + worker.mixed_step_ms(parts), now_ms + step_ms
        return any(part.is_last and before_ms <= part.prompt.deadline_ms < after_ms for part in parts)

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
            policy=NAME,
            outcomes=tuple(sorted(self._outcomes, key=lambda outcome: outcome.request.index)),
            busy_ms={
                worker_id: tuple(busy.get(at, 0.0) for at in range(windows))
                for worker_id, busy in self._busy_ms.items()
            },
            window_ms=self._window_ms,
            span_ms=max(arrivals) - min(arrivals) if arrivals else 0.0,
            sla=self._sla,
        )
