"""The schedule of the looser upper bound: whoever is free takes the next chunk of the most urgent prompt.

It decides what no router does: a prompt gives way to a more urgent one at each chunk, goes on wherever a worker is
free, and beside answers a chunk is as long as their promises allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from antiphon_policy.route_records import WorkerRole

from antiphon_simulate.bound_queue import Part
from antiphon_simulate.bound_schedule import BoundSchedule
from antiphon_simulate.bound_worker import BoundWorker
from antiphon_simulate.records import ClusterShape, Sla, Timing, TraceRequest

_LEAST_SHARE = 1 / 16
"""Of a whole chunk: what a part beside answers has at least, unless the prompt ends with it."""


class ChunkedSchedule(BoundSchedule):
    """One run."""

    name = "bound_chunked"

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
        super().__init__(requests, shape, timing, sla, window_ms=window_ms, block_tokens=block_tokens)
        self._longest_ms = longest_ms
        """Of a step with prompts on a worker that decodes, for the sake of answers that come meanwhile."""
        self._least_tokens = math.ceil(timing.chunk_tokens * _LEAST_SHARE)

    @staticmethod
    def chunk_tokens(role: WorkerRole, timing: Timing) -> int:
        return max(timing.chunk_tokens, timing.mixed_chunk_tokens)

    def _part_done(self, worker: BoundWorker, part: Part) -> None:
        self._queue.wait(part.prompt)

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
