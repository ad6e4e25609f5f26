"""A client's request on its way: a `Flight`, with one `Choice` for each answer that it asked for.

The handler owns the flight and waits on it; the dispatcher moves its choices. A choice collects the steps that came
for it until the handler takes them. What a slow client leaves is bounded (`buffer_steps`); nothing here ever waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon_policy.admission import Priority
from antiphon_proto import worker_pb2 as pb
from opentelemetry.trace import Span

from antiphon_gateway.errors import ApiError, client_too_slow
from antiphon_gateway.explain import Trail
from antiphon_gateway.groups import Group
from antiphon_gateway.http import ClientGone
from antiphon_gateway.metrics import RequestMetrics
from antiphon_gateway.models import Model, Prompt
from antiphon_gateway.wishes import NO_WISHES, Wishes

if TYPE_CHECKING:
    from antiphon_gateway.dispatch import Attempt


@dataclass(frozen=True, slots=True)
class Ticket:
    """Whose request it is, and how it is known elsewhere."""

    request_id: str
    tenant: str
    salt: bytes
    """The tenant's own."""
    traceparent: str
    span: Span
    arrived_at: float
    """Monotonic."""
    wishes: Wishes = NO_WISHES


@dataclass(frozen=True, slots=True)
class Target:
    """What the client's model name led to, at this start of the request."""

    name: str
    """As the client said it, and as the answer says it."""
    group: Group
    model: Model
    max_context_tokens: int
    salt: bytes
    """Of the block chains: the tenant's, or none where the Model's tenants share their blocks."""


class StartAgain(ApiError):
    """Nothing was sent yet, and the request's group can serve it no more: its handler starts it again for another one.

    To a client, should one ever see it: the model has no worker now.
    """

    def __init__(self, error: ApiError, failures: int) -> None:
        super().__init__(
            error.status, error.message, type=error.type, code=error.code, retry_after_s=error.retry_after_s
        )
        self.failures = failures
        """How often workers have failed on it so far."""


class Choice:
    """One answer being made. It has ended when `finish` or `failure` is set."""

    __slots__ = (
        "attempt",
        "buffer_steps",
        "cached_tokens",
        "continued",
        "excluded",
        "failure",
        "failures",
        "finish",
        "flight",
        "group",
        "index",
        "order",
        "output",
        "prompt",
        "sampling",
        "steps",
        "submits",
        "why_failed",
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
        self.group = flight.target.group
        """Only workers of it serve the choice. It may change as long as there is no output."""
        self.order = 0
        """Its place in the waiting queue, kept when it has to wait again."""
        self.submits = 0
        self.failures = 0
        """How often a worker failed on it or was lost with it."""
        self.why_failed = ""
        self.excluded: set[str] = set()
        """Workers that failed on it or turned it away for good."""
        self.output: list[int] = []
        """All ids so far, also those whose text a worker holds back: what another worker needs to go on."""
        self.continued = False
        """The attempt goes on with another one's output."""
        self.cached_tokens = 0

    @property
    def completion_tokens(self) -> int:
        return len(self.output)

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
        self.output.extend(step.token_ids)
        # What was cached when the client got its first token counts, whoever goes on.
        if step.HasField("usage") and not self.continued:
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
        target: Target,
        prompts: Sequence[Prompt],
        sampling: pb.Sampling,
        *,
        choices_per_prompt: int,
        buffer_steps: int,
        metrics: RequestMetrics,
        failures: int = 0,
        trail: Trail | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        """`failures`: of earlier starts of the request. `trail`: where it is told what becomes of it."""
        self.ticket = ticket
        self.target = target
        self.model = target.model
        self.prompts = prompts
        self.metrics = metrics
        self.priority = priority
        self.trail = trail or Trail(ticket)
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
        for choice in self.choices:
            choice.failures = failures
        self.ready: list[Choice] = []
        """Choices that have steps to take."""
        self.open_choices = len(self.choices)
        """Those that have not ended."""
        self.failure: ApiError | None = None
        """The first failure of a choice: the whole request fails with it."""
        self.began_at = ticket.arrived_at
        self.queued_at = ticket.arrived_at
        """From when its waiting counts."""
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

    @property
    def untouched(self) -> bool:
        """Nothing has come for any choice."""
        return all(not choice.output and not choice.ended for choice in self.choices)

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
