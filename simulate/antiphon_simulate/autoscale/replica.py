"""One worker of the elastic cluster, and what it computes: a batch of prompts, or a batch of answers.

A prefill worker takes prompts from the line that all share: as many as fit one step's chunk, or one longer one. An
answer's batch runs as the step model says; between two changes of it nothing is computed (`decodes.DecodeBatch`).
Whoever joins does so at the next step boundary, as in the step-level worker.
"""

from __future__ import annotations

import enum

from antiphon_policy.routing import WorkerRole

from antiphon_simulate.autoscale.records import Serving
from antiphon_simulate.decodes import DecodeBatch
from antiphon_simulate.records import Timing


class Life(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """It ends what it has, and takes nothing new; then it goes or takes up the other role."""
    GONE = "gone"


class Replica:
    def __init__(self, number: int, role: WorkerRole, timing: Timing, ready_ms: float) -> None:
        self.number = number
        self.role = role
        self.life = Life.STARTING
        self.ready_ms = ready_ms
        """When it will be, or became, ready in this role."""
        self.expected_ms = ready_ms
        """When those who ask expect it to be."""
        self.asked_ms: float | None = None
        """When it was asked to start, or to go."""
        self.drains = 0
        """How often it was told to drain: which end of the time for that counts."""
        self.becomes: WorkerRole | None = None
        """The role it takes up when it is drained; None: it goes."""
        self.prompts: tuple[Serving, ...] = ()
        """What it computes the prompts of now."""
        self.batch: DecodeBatch[Serving] = DecodeBatch(timing.step)
        self.held_tokens = 0
        """KV room that its answers have taken, with what they will need."""
        self.planned = 0
        """Which planned end of the batch is the one that counts."""
        self._boundary_ms = 0.0
        """When the next step of the batch begins."""
        self._needs: dict[int, int] = {}

    @property
    def is_idle(self) -> bool:
        return not self.prompts and not self.batch

    def join(self, serving: Serving, now_ms: float) -> list[tuple[Serving, float]]:
        """Takes an answer on. Those that ended by the boundary at which it joins, with their times."""
        ended = self.advance(now_ms)
        if not self.batch:
            self._boundary_ms = max(now_ms, self._boundary_ms)
        self.batch.join(serving)
        need = serving.prompt_tokens + serving.output_tokens
        self._needs[serving.call.index] = need
        self.held_tokens += need
        return ended

    def advance(self, now_ms: float) -> list[tuple[Serving, float]]:
        """To the first step boundary at `now_ms` or after it."""
        ended: list[tuple[Serving, float]] = []
        batch = self.batch
        while batch and now_ms > self._boundary_ms:
            steps = min(batch.steps_begun(now_ms - self._boundary_ms), batch.steps_to_next_end())
            self._boundary_ms += batch.steps_ms(steps)
            for serving in batch.advance(steps):
                self.held_tokens -= self._needs.pop(serving.call.index)
                ended.append((serving, self._boundary_ms))
        return ended

    def next_end_ms(self) -> float:
        """When the first answer of the batch will be complete; there must be one."""
        return self._boundary_ms + self.batch.steps_ms(self.batch.steps_to_next_end())

    def leave(self) -> list[Serving]:
        """All answers go from here, with what they have so far."""
        left = []
        for serving, remaining in self.batch.leave():
            done = serving.output_tokens - 1 - remaining
            serving.prompt_tokens += done
            serving.output_tokens -= done
            serving.moves += 1
            left.append(serving)
        self.held_tokens = 0
        self._needs.clear()
        return left
