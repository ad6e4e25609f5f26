"""The sequences that decode on a worker, many steps at once.

Between two changes of the batch every sequence grows by one token a step, so the steps' durations grow linearly and
their sum has a closed form: an hour of decoding costs a few operations per request, not per token.

    step j = 0, 1, ...:  first + j * growth
    first  = base + (per_new_token + per_sequence) * B + (per_token_context + per_kv_token) * C
    growth =                                             (per_token_context + per_kv_token) * B
    n steps together:  n * first + growth * n * (n - 1) / 2

with B sequences whose contexts at the end of the next step sum up to C.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, Protocol, TypeVar

from antiphon_policy.latency import StepModel


class Decoding(Protocol):
    """What a sequence is here."""

    prompt_tokens: int
    output_tokens: int


Decodes = TypeVar("Decodes", bound=Decoding)


class DecodeBatch(Generic[Decodes]):
    """Knows no time: whoever owns it says how many steps went by."""

    def __init__(self, step: StepModel) -> None:
        self._step = step
        self._steps = 0
        self._ends: list[tuple[int, int, Decodes]] = []
        """(after which step, order of joining, job)."""
        self._joined = 0
        self.context_tokens = 0
        """Sum of the contexts at the end of the next step."""

    def __len__(self) -> int:
        return len(self._ends)

    def join(self, job: Decodes) -> None:
        """A job whose first token is there and at least one is to come."""
        self._joined += 1
        heapq.heappush(self._ends, (self._steps + job.output_tokens - 1, self._joined, job))
        self.context_tokens += job.prompt_tokens + 1

    def steps_to_next_end(self) -> int:
        """Steps until the first sequence is complete; the batch must not be empty."""
        return self._ends[0][0] - self._steps

    def advance(self, steps: int) -> list[Decodes]:
        """So many steps were computed, at most `steps_to_next_end`. The jobs that are complete, and gone from here."""
        self._steps += steps
        self.context_tokens += steps * len(self._ends)
        ended: list[Decodes] = []
        while self._ends and self._ends[0][0] == self._steps:
            job = heapq.heappop(self._ends)[2]
            self.context_tokens -= job.prompt_tokens + job.output_tokens
            ended.append(job)
        return ended

    def leave(self) -> list[tuple[Decodes, int]]:
        """All go from here unfinished, each with the tokens that it has yet to get."""
        left = [(job, end - self._steps) for end, _, job in sorted(self._ends, key=lambda one: one[:2])]
        self._ends.clear()
        self.context_tokens = 0
        return left

    def steps_ms(self, steps: int) -> float:
        """How long the next `steps` steps take together, with nothing but this batch in them."""
        first_ms, growth_ms = self._terms()
        return steps * first_ms + growth_ms * (steps * (steps - 1) / 2)

    def steps_begun(self, elapsed_ms: float) -> int:
        """The least number of steps that take `elapsed_ms` or more."""
        if elapsed_ms <= 0.0:
            return 0
        first_ms, growth_ms = self._terms()
        if growth_ms > 0.0:
            linear = first_ms - growth_ms / 2
            # The root of growth / 2 * n^2 + linear * n = elapsed, in the form that does not cancel.
            exact = 2 * elapsed_ms / (linear + math.sqrt(linear * linear + 2 * growth_ms * elapsed_ms))
        else:
            exact = elapsed_ms / first_ms
        steps = math.ceil(exact)
        # Rounding: the closed form itself decides.
        while steps > 0 and self.steps_ms(steps - 1) >= elapsed_ms:
            steps -= 1
        while self.steps_ms(steps) < elapsed_ms:
            steps += 1
        return steps

    def _terms(self) -> tuple[float, float]:
        step = self._step
        per_context = step.per_token_context_ms + step.per_kv_token_ms
        sequences = len(self._ends)
        first_ms = (
            step.base_ms
            + (step.per_new_token_ms + step.per_sequence_ms) * sequences
            + per_context * self.context_tokens
        )
        return first_ms, per_context * sequences
