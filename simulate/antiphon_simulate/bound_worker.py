"""A worker of the upper bound (`bound.py`): steps as real ones take them, with no memory to run out of.

It computes parts of prompts that it is given, and decodes answers that it has been given, many steps at once where
there are no prompts among them. What it adds to the simulator's own worker: it knows by when each of its answers is
promised, so it can say whether one more answer, or a prompt's chunk, would break a promise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon_policy.latency import StepModel
from antiphon_policy.routing import WorkerRole

from antiphon_simulate.bound_queue import Part
from antiphon_simulate.decodes import DecodeBatch
from antiphon_simulate.records import Outcome

_CLOSE_MS = 1e-6


@dataclass(slots=True, eq=False)
class Answer:
    """One request from its first token to its last."""

    outcome: Outcome
    prompt_tokens: int
    output_tokens: int
    promised_ms: float
    """Its last token is inside the SLA until then."""
    last_step: int = 0
    """Of its worker, counted from the worker's first."""


@dataclass(frozen=True, slots=True)
class Run:
    """What the worker is at: one step with parts of prompts, or steps that only decode."""

    start_ms: float
    end_ms: float
    decode_steps: int
    parts: tuple[Part, ...]


class BoundWorker:
    """Knows no events: whoever owns it begins its runs and ends them at their `end_ms`."""

    def __init__(
        self, worker_id: str, role: WorkerRole, step: StepModel, *, chunk_tokens: int, max_running: int
    ) -> None:
        self.worker_id = worker_id
        self.decodes = role is not WorkerRole.PREFILL
        self.step = step
        self.run: Run | None = None
        self.busy_ms = 0.0
        """Kept by its owner."""
        self.prompts_ms = 0.0
        """What prompts that stay here will still add to its steps. Kept by its owner, if prompts do stay."""
        self.longest_prompt_step_ms = 0.0
        """What they will add to one step at most."""
        self.chunk_tokens = chunk_tokens
        self._max_running = max_running
        self._batch: DecodeBatch[Answer] = DecodeBatch(step)
        self._answers: dict[Answer, None] = {}
        self._joining: deque[Answer] = deque()
        self._joining_tokens = 0
        self._steps = 0

    # -- answers

    @property
    def has_place(self) -> bool:
        return len(self._batch) + len(self._joining) < self._max_running

    @property
    def has_answers(self) -> bool:
        return bool(self._answers or self._joining)

    def would_end_ms(self, answer: Answer, now_ms: float) -> float:
        """When one more answer would be complete: what is least where most slack is."""
        begin_ms, steps = self._next_boundary(now_ms)
        first_ms, growth_ms = self._steps_with(answer, steps)
        left = answer.output_tokens - 1
        return begin_ms + self._delay_ms(left) + left * first_ms + growth_ms * left * (left - 1) / 2

    def add(self, answer: Answer, now_ms: float) -> None:
        """It decodes from the next step on. A run of steps that only decode is cut at its next boundary."""
        self._joining.append(answer)
        self._joining_tokens += answer.prompt_tokens + 1
        self.interrupt(now_ms)

    def keeps_promises_with(self, answer: Answer, now_ms: float) -> bool:
        """Whether with this one more all of its answers that would be in time without it still are. Reckoned as if
        nobody left the batch meanwhile, so yes is sure if nobody joins either."""
        begin_ms, steps = self._next_boundary(now_ms)
        first_ms, growth_ms = self._steps_with(answer, steps)
        before_ms = first_ms - self._answer_ms(answer)
        others = [(one.last_step - self._steps - steps, one.promised_ms) for one in self._answers]
        others += [(one.output_tokens - 1, one.promised_ms) for one in self._joining]
        for left, promised_ms in others:
            ends_ms = begin_ms + self._delay_ms(left) + left * before_ms
            added_ms = left * (first_ms - before_ms) + growth_ms * left * (left - 1) / 2
            if ends_ms <= promised_ms + _CLOSE_MS < ends_ms + added_ms:
                return False
        return True

    # -- runs

    def budget_tokens(self) -> int:
        """Prompt tokens that fit into its next step."""
        self._let_join()
        return self.chunk_tokens - len(self._batch)

    def spare_ms(self, now_ms: float) -> float:
        """How much longer its next step may be with no promise broken to those who decode here."""
        self._let_join()
        first_ms, growth_ms = self._batch.steps_ms(1), self._per_context_ms * len(self._batch)
        spare_ms = math.inf
        for one in self._answers:
            left = one.last_step - self._steps
            ends_ms = now_ms + left * first_ms + growth_ms * left * (left - 1) / 2
            if ends_ms <= one.promised_ms:
                spare_ms = min(spare_ms, one.promised_ms - ends_ms)
        return spare_ms

    def keeps_promises_beside(self, adds_ms: float, adds_to_step_ms: float, now_ms: float) -> bool:
        """Whether all of those who decode here and would be in time still are with a prompt that stays here and adds
        so much to the steps to come, and to one of them at most."""
        self._let_join()
        first_ms, growth_ms = self._batch.steps_ms(1), self._per_context_ms * len(self._batch)
        of_step_ms = max(adds_to_step_ms, self.longest_prompt_step_ms)
        for one in self._answers:
            left = one.last_step - self._steps
            ends_ms = now_ms + left * first_ms + growth_ms * left * (left - 1) / 2
            before_ms, after_ms = self._delay_ms(left), min(self.prompts_ms + adds_ms, left * of_step_ms)
            if ends_ms + before_ms <= one.promised_ms < ends_ms + after_ms:
                return False
        return True

    def mixed_step_ms(self, parts: Sequence[Part]) -> float:
        """One step with these parts, and one token for each answer in the batch."""
        sequences = len(self._batch)
        new_tokens = sequences
        token_context = kv_tokens = self._batch.context_tokens
        for part in parts:
            new_tokens += part.tokens
            token_context += part.tokens * part.end_tokens
            kv_tokens += part.end_tokens
        return self.step.step_ms(
            new_tokens=new_tokens,
            token_context=token_context,
            sequences=sequences + len(parts),
            kv_tokens=kv_tokens,
        )

    def begin(self, now_ms: float, parts: Sequence[Part]) -> Run | None:
        """The next run: a step with these parts, else steps that only decode, up to the next answer's end. None: there
        is nothing to do."""
        self._let_join()
        if parts:
            steps = 1 if len(self._batch) else 0
            self.run = Run(now_ms, now_ms + self.mixed_step_ms(parts), steps, tuple(parts))
        elif len(self._batch):
            steps = self._batch.steps_to_next_end()
            self.run = Run(now_ms, now_ms + self._batch.steps_ms(steps), steps, ())
        return self.run

    def interrupt(self, now_ms: float) -> None:
        """A run of steps that only decode ends at its next step boundary."""
        run = self.run
        if run is not None and not run.parts:
            end_ms, steps = self._next_boundary(now_ms)
            if steps < run.decode_steps:
                self.run = Run(run.start_ms, end_ms, steps, ())

    def end(self) -> list[Answer]:
        """The run is over. The answers that are complete."""
        run = self.run
        assert run is not None
        self.run = None
        if not run.decode_steps:
            return []
        self._steps += run.decode_steps
        complete = self._batch.advance(run.decode_steps)
        for answer in complete:
            del self._answers[answer]
        return complete

    # -- inside

    @property
    def _per_context_ms(self) -> float:
        return self.step.per_token_context_ms + self.step.per_kv_token_ms

    def _next_boundary(self, now_ms: float) -> tuple[float, int]:
        """(when the step that it is in ends, the decode steps of its run until then)."""
        run = self.run
        if run is None:
            return now_ms, 0
        if run.parts:
            return run.end_ms, run.decode_steps
        steps = max(1, self._batch.steps_begun(now_ms - run.start_ms))
        return run.start_ms + self._batch.steps_ms(steps), steps

    def _delay_ms(self, steps: int) -> float:
        """How much longer the next steps are for the prompts that stay here."""
        return min(self.prompts_ms, steps * self.longest_prompt_step_ms)

    def _answer_ms(self, answer: Answer) -> float:
        """What one more answer adds to its first step."""
        of_one = self.step.per_new_token_ms + self.step.per_sequence_ms
        return of_one + self._per_context_ms * (answer.prompt_tokens + 1)

    def _steps_with(self, answer: Answer, steps: int) -> tuple[float, float]:
        """(the first decode step after `steps` more, with one more answer; by how much each further one is longer)."""
        sequences = len(self._batch) + len(self._joining)
        contexts = self._batch.context_tokens + steps * len(self._batch) + self._joining_tokens
        first_ms = self.step.step_ms(
            new_tokens=sequences, token_context=contexts, sequences=sequences, kv_tokens=contexts
        )
        return first_ms + self._answer_ms(answer), self._per_context_ms * (sequences + 1)

    def _let_join(self) -> None:
        while self._joining:
            answer = self._joining.popleft()
            answer.last_step = self._steps + answer.output_tokens - 1
            self._answers[answer] = None
            self._batch.join(answer)
        self._joining_tokens = 0
