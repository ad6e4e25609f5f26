"""The schedule of the upper bound, request by request: a prompt stays on the worker that began it.

There it runs as in a real engine: first come, first served, in the engine's own chunks, with further prompts in what is
left of a step. What is decided here is what a router could decide: which prompt begins next, and where. Prompts begin
when a worker has room for them in its next step, never before, so nothing is decided earlier than it must be.

A `Manner` is one greedy way to decide it; `bound.py` takes the best of a few.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from antiphon_policy.route_records import WorkerRole

from antiphon_simulate.bound_queue import CLOSE_MS, Part, Prompt
from antiphon_simulate.bound_schedule import BoundSchedule
from antiphon_simulate.bound_worker import BoundWorker
from antiphon_simulate.records import ClusterShape, Sla, Timing, TraceRequest


class PromptsBesideAnswers(enum.Enum):
    """Whether prompts begin on workers that decode."""

    NEVER = "never"
    """Only on those that do nothing else. (No way to serve without such workers.)"""
    HARMLESS = "harmless"
    """Where no answer that is in time there gets late by it."""
    ALWAYS = "always"
    """As soon as they have room in a step."""


@dataclass(frozen=True, slots=True)
class Manner:
    """A greedy way to decide."""

    beside_answers: PromptsBesideAnswers
    gives_up: bool
    """Of those that cannot all be in time, the dearest are served last of all, from the start; else each is tried until
    it is late."""


class RequestSchedule(BoundSchedule):
    """One run."""

    name = "bound"

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        shape: ClusterShape,
        timing: Timing,
        sla: Sla,
        *,
        manner: Manner,
        window_ms: float,
        block_tokens: int,
    ) -> None:
        self._manner = manner
        super().__init__(requests, shape, timing, sla, window_ms=window_ms, block_tokens=block_tokens)
        self._begun: dict[BoundWorker, list[Prompt]] = {worker: [] for worker in self._workers}
        """The prompts that stay there, in the order in which they began."""
        self._late_prompt: Prompt | None = None
        """The one late one that runs while others are to come."""
        prefillers = [worker for worker in self._workers if self._may_prefill(worker)]
        token_ms = {worker: worker.step.prefill_ms(new_tokens=1) for worker in prefillers}
        self._speeds = {worker: min(token_ms.values()) / its_ms for worker, its_ms in token_ms.items()}
        self._to_come_at_last_look = self._to_come

    @staticmethod
    def chunk_tokens(role: WorkerRole, timing: Timing) -> int:
        return timing.chunk_tokens if role is WorkerRole.PREFILL else timing.mixed_chunk_tokens

    def _may_prefill(self, worker: BoundWorker) -> bool:
        return not worker.decodes or self._manner.beside_answers is not PromptsBesideAnswers.NEVER

    def _wants_step(self, worker: BoundWorker) -> bool:
        if self._begun[worker]:
            return True
        return self._may_prefill(worker) and (
            self._queue.has_in_time or (self._queue.is_waiting and self._late_may_begin())
        )

    def _part_done(self, worker: BoundWorker, part: Part) -> None:
        """It stays where it is."""

    def _share_out(self, free: Sequence[BoundWorker], now_ms: float) -> Mapping[BoundWorker, Sequence[Part]]:
        """First who has begun goes on; then there is one prompt for each worker without any, and then steps are filled
        up."""
        self._give_up(now_ms)
        parts: dict[BoundWorker, list[Part]] = {}
        for worker in free:
            its = parts[worker] = []
            left = worker.budget_tokens()
            for prompt in self._begun[worker]:
                if left > 0 and (part := self._queue.resume(prompt, left)) is not None:
                    its.append(part)
                    left -= part.tokens
            self._count_prompts(worker, {})
        for worker, its in parts.items():
            if not self._begun[worker]:
                self._begin(worker, its, now_ms)
        for worker, its in parts.items():
            while its and self._begin(worker, its, now_ms):
                pass
        for worker, its in parts.items():
            for part in its:
                if part.is_last:
                    self._begun[worker].remove(part.prompt)
                    if part.prompt is self._late_prompt:
                        self._late_prompt = None
            self._count_prompts(worker, {part.prompt: part.end_tokens for part in its})
        return parts

    def _count_prompts(self, worker: BoundWorker, done_tokens: Mapping[Prompt, int]) -> None:
        """What is left of those that have begun there, after what `done_tokens` says of them."""
        begun = self._begun[worker]
        worker.prompts_ms = sum(self._adds_ms(worker, prompt, done_tokens.get(prompt)) for prompt in begun)
        worker.longest_prompt_step_ms = max((self._adds_to_step_ms(worker, prompt) for prompt in begun), default=0.0)

    def _begin(self, worker: BoundWorker, its: list[Part], now_ms: float) -> bool:
        """One more prompt in the worker's next step, if one is waiting that had better begin there now."""
        left = worker.budget_tokens() - sum(part.tokens for part in its)
        if left <= 0 or not self._may_prefill(worker):
            return False
        decode_ms = worker.mixed_step_ms(()) if worker.has_answers else 0.0

        def fits(prompt: Prompt) -> bool:
            adds_ms = self._adds_ms(worker, prompt)
            ends_ms = now_ms + worker.prompts_ms + adds_ms + self._steps(worker, prompt) * decode_ms
            in_time = prompt.is_late or ends_ms <= prompt.deadline_ms + CLOSE_MS
            return in_time and self._is_harmless(worker, prompt, adds_ms, now_ms)

        part = self._queue.take(now_ms, left, fits=fits, late=self._late_may_begin())
        if part is None:
            return False
        if its and self._makes_late(worker, its, now_ms, worker.mixed_step_ms([*its, part])):
            self._queue.put_back(part)
            return False
        its.append(part)
        self._begun[worker].append(part.prompt)
        self._count_prompts(worker, {})
        if part.prompt.is_late and self._late_prompt is None:
            self._late_prompt = part.prompt
        return True

    def _is_harmless(self, worker: BoundWorker, prompt: Prompt, adds_ms: float, now_ms: float) -> bool:
        """To those who decode there, and to who comes next: somewhere an answer can still begin that is in time."""
        if not worker.decodes or self._manner.beside_answers is not PromptsBesideAnswers.HARMLESS:
            return True
        adds_to_step_ms = self._adds_to_step_ms(worker, prompt)
        if self._crowds_out(worker, adds_to_step_ms):
            others = [one for one in self._decoders if one is not worker]
            if others and all(self._crowds_out(one, one.longest_prompt_step_ms) for one in others):
                return False
        return worker.keeps_promises_beside(adds_ms, adds_to_step_ms, now_ms)

    def _crowds_out(self, worker: BoundWorker, adds_to_step_ms: float) -> bool:
        """Whether no answer can be in time beside it that could be without it."""
        return worker.step.base_ms <= self._sla.tpot_ms < worker.step.base_ms + adds_to_step_ms

    def _late_may_begin(self) -> bool:
        """One that is late anyway takes a worker from others that are not. So one at a time, while others are to come;
        if the dearest are given up, only while nobody else's prompt runs."""
        if not self._to_come:
            return True
        if self._manner.gives_up:
            return not any(self._begun.values())
        return self._late_prompt is None

    def _give_up(self, now_ms: float) -> None:
        if self._manner.gives_up and self._to_come < self._to_come_at_last_look:
            self._to_come_at_last_look = self._to_come
            self._queue.give_up_dearest(
                [(self._free_ms(worker, now_ms), speed) for worker, speed in self._speeds.items()]
            )

    @staticmethod
    def _free_ms(worker: BoundWorker, now_ms: float) -> float:
        """When it could begin another prompt."""
        run = worker.run
        return (run.end_ms if run is not None and run.parts else now_ms) + worker.prompts_ms

    @staticmethod
    def _makes_late(worker: BoundWorker, parts: Sequence[Part], now_ms: float, step_ms: float) -> bool:
        """Whether a prompt that is complete in time after a step with these parts is not after one of `step_ms`."""
        before_ms, after_ms = now_ms + worker.mixed_step_ms(parts), now_ms + step_ms
        return any(part.is_last and before_ms <= part.prompt.deadline_ms < after_ms for part in parts)

    def _adds_ms(self, worker: BoundWorker, prompt: Prompt, there: int | None = None) -> float:
        """To the worker's steps, from where the prompt is, or from `there` on: beside answers without what a step
        costs by itself."""
        prompt_tokens = prompt.request.prompt_tokens
        if there is None:
            there = min(self._queue.tokens_there(prompt), prompt_tokens - 1)
        adds_ms = worker.step.prefill_ms(
            new_tokens=prompt_tokens - there, cached_tokens=there, chunk_tokens=max(1, worker.budget_tokens())
        )
        if worker.has_answers and there < prompt_tokens:
            adds_ms -= self._steps(worker, prompt, there) * worker.step.base_ms
        return adds_ms

    def _adds_to_step_ms(self, worker: BoundWorker, prompt: Prompt) -> float:
        """The most that it adds to one step."""
        tokens, step = prompt.request.prompt_tokens, worker.step
        new_tokens = min(worker.chunk_tokens, tokens)
        one_ms = step.step_ms(new_tokens=new_tokens, token_context=new_tokens * tokens, sequences=1, kv_tokens=tokens)
        return one_ms - step.base_ms

    def _steps(self, worker: BoundWorker, prompt: Prompt, there: int | None = None) -> int:
        if there is None:
            there = self._queue.tokens_there(prompt)
        return -(-max(1, prompt.request.prompt_tokens - there) // max(1, worker.budget_tokens()))
