"""A client's request on its way: a `Flight`, with one `Choice` for each answer that it asked for.

The handler owns the flight and waits on it; the dispatcher moves its choices. A choice collects the steps that came
for it until the handler takes them. What a slow client leaves is bounded (`buffer_steps`); nothing here ever waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon_proto import worker_pb2 as pb
from opentelemetry.trace import Span

from antiphon_gateway.errors import ApiError, client_too_slow
from antiphon_gateway.http import ClientGone
from antiphon_gateway.metrics import RequestMetrics
from antiphon_gateway.models import Model, Prompt

if TYPE_CHECKING:
    from antiphon_gateway.dispatch import Attempt


@dataclass(frozen=True, slots=True)
class Ticket:
    """Whose request it is, and how it is known elsewhere."""

    request_id: str
    tenant: str
    salt: bytes
    traceparent: str
    span: Span


class Choice:
    """One answer being made. It has ended when `finish` or `failure` is set."""

    __slots__ = (
        "attempt",
        "buffer_steps",
        "cached_tokens",
        "completion_tokens",
        "excluded",
        "failure",
        "failures",
        "finish",
        "flight",
        "index",
        "order",
        "prompt",
        "sampling",
        "steps",
        "submits",
    )

    def __init__(self, flight: Flight, index: int, prompt: Prompt, sampling: pb.Sampling, buffer_steps: int) -> None:
        self.flight = flight
        self.index = index
        self.prompt = prompt
        self.sampling = sampling
        self.buffer_steps = buffer_steps
        self.steps: list[pb.RequestStep] = []
        self.finish: pb.Finish.ValueType = pb.FINISH_NONE
        self.failure: ApiError | None = None
        self.attempt: Attempt | None = None
        self.order = 0
        """Its place in the waiting queue, kept when it has to wait again."""
        self.submits = 0
        self.failures = 0
        self.excluded: set[str] = set()
        """Workers that failed on it or turned it away for good."""
        self.completion_tokens = 0
        self.cached_tokens = 0

    @property
    def ended(self) -> bool:
        return self.failure is not None or self.finish != pb.FINISH_NONE

    def put(self, step: pb.RequestStep) -> bool:
        """Keep a step for the handler. False: the buffer is full, and the choice has failed."""
        if not self.steps:
            self.flight.ready.append(self)
        elif len(self.steps) >= self.buffer_steps:
            self.fail(client_too_slow())
            return False
        self.completion_tokens += len(step.token_ids)
        if step.HasField("usage"):
            self.cached_tokens = step.usage.cached_tokens
        self.steps.append(step)
        if step.finish:
            self.finish = step.finish
            self.flight.open_choices -= 1
        self.flight.wake()
        return True

    def take(self) -> list[pb.RequestStep]:
        """The steps that came since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def fail(self, error: ApiError) -> None:
        if not self.ended:
            self.failure = error
            self.flight.open_choices -= 1
            if self.flight.failure is None:
                self.flight.failure = error
            self.flight.wake()


class Flight:
    """See the module."""

    def __init__(
        self,
        ticket: Ticket,
        model: Model,
        prompts: Sequence[Prompt],
        sampling: pb.Sampling,
        *,
        choices_per_prompt: int,
        buffer_steps: int,
        metrics: RequestMetrics,
    ) -> None:
        self.ticket = ticket
        self.model = model
        self.prompts = prompts
        self.metrics = metrics
        self.choices = [
            Choice(
                self,
                index,
                prompts[index // choices_per_prompt],
                _for_choice(sampling, index % choices_per_prompt),
                buffer_steps,
            )
            for index in range(len(prompts) * choices_per_prompt)
        ]
        self.ready: list[Choice] = []
        """Choices that have steps to take."""
        self.open_choices = len(self.choices)
        """Those that have not ended."""
        self.failure: ApiError | None = None
        """The first failure of a choice: the whole request fails with it."""
        self.began_at = time.monotonic()
        self.has_token = False
        self.writing_since = 0.0
        """When the handler began to write to the client; 0 while it does not."""
        self.deadline_timer: asyncio.TimerHandle | None = None
        self._choices_per_prompt = choices_per_prompt
        self._event = asyncio.Event()
        self._gone = False

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed. Choices of one prompt share it: the one that hit least counts."""
        size = self._choices_per_prompt
        groups = (self.choices[start : start + size] for start in range(0, len(self.choices), size))
        return sum(min(choice.cached_tokens for choice in group) for group in groups)

    def take_ready(self) -> list[Choice]:
        """The choices that have steps to take, each once."""
        ready, self.ready = self.ready, []
        return ready

    def wake(self) -> None:
        self._event.set()

    def client_gone(self) -> None:
        self._gone = True
        self._event.set()

    def end(self, error: ApiError) -> None:
        """End every choice that has not ended yet."""
        for choice in self.choices:
            choice.fail(error)

    async def wait(self) -> None:
        """Return when something came or failed. Raises ClientGone. Bounded by the worker's heartbeats and the
        sweeper's limits, which fail the choices."""
        await self._event.wait()
        self._event.clear()
        if self._gone:
            raise ClientGone


def _for_choice(sampling: pb.Sampling, index: int) -> pb.Sampling:
    own = pb.Sampling()
    own.CopyFrom(sampling)
    own.choice = index
    return own
