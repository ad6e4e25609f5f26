"""A client's request on its way: a `Flight`, with one `Choice` for each answer that it asked for.

The handler owns the flight and waits on it; the dispatcher moves its choices. Of a streamed answer, steps go on to the
client as they come; where they cannot, a choice collects them until the handler takes them, and what a slow client
leaves is bounded (`buffer_steps`). Of an answer that is sent whole only the texts are collected, and the handler sleeps
to its end. Nothing here ever waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from antiphon_kvtransfer.identity import BlockHash
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
    from antiphon_gateway.attempt import Attempt


class Ticket(msgspec.Struct, frozen=True, gc=False):
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


class Target(msgspec.Struct, frozen=True, gc=False):
    """What the client's model name led to, at this start of the request."""

    name: str
    """As the client said it, and as the answer says it."""
    group: Group
    model: Model
    max_context_tokens: int
    salt: bytes
    """Of the block chains: the tenant's, or none where the Model's tenants share their blocks."""
    takes_templates: bool = False
    """Whether a request may bring a chat template of its own."""


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
        "_chain",
        "attempt",
        "buffer_steps",
        "cached_tokens",
        "continued",
        "excluded",
        "failure",
        "failures",
        "finish",
        "first_token_at",
        "flight",
        "group",
        "held_logprobs",
        "index",
        "last_token_at",
        "leader",
        "logprobs",
        "moved_from",
        "moves",
        "order",
        "output",
        "prompt",
        "prompt_at",
        "prompt_logprobs",
        "sampling",
        "steps",
        "stop_reason",
        "submits",
        "texts",
        "why_failed",
        "why_moved",
    )

    def __init__(self, flight: Flight, index: int, prompt: Prompt, sampling: pb.Sampling, buffer_steps: int) -> None:
        self.flight = flight
        self.index = index
        self.prompt = prompt
        self.sampling = sampling
        self.buffer_steps = buffer_steps
        self.steps: list[pb.RequestStep] = []
        """Of a streamed answer, those that the handler has not taken yet."""
        self.texts: list[str] = []
        """Of an answer that is sent whole: all that came."""
        self.logprobs: list[pb.TokenLogprob] = []
        self.finish: pb.Finish.ValueType = pb.FINISH_NONE
        self.stop_reason = ""
        """The stop string or id that ended it; empty: it ended by itself, or where it had to."""
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
        self.why_moved = ""
        self.excluded: set[str] = set()
        """Workers that failed on it or turned it away for good."""
        self.output: list[int] = []
        """All ids so far, also those whose text a worker holds back: what another worker needs to go on."""
        self.held_logprobs: list[pb.TokenLogprob] | None = [] if sampling.HasField("logprobs") else None
        """Of the last ids of `output`, whose text the worker holds back; None: none are wanted."""
        self.leader: Choice | None = None
        """The choice that computes their prompt first; while it does, this one is offered to nobody."""
        self.prompt_at = ""
        """The worker that computed the prompt for the leader: it has its blocks, whether or not its index says so."""
        self.moves = 0
        """How often it went from one worker to another one, for whatever reason."""
        self.moved_from = ""
        """The worker that gave it back last: it has the answer's blocks for as long as it stands."""
        self.last_token_at = 0.0
        """Monotonic."""
        self._chain: tuple[int, tuple[BlockHash, ...]] = (0, prompt.chain)
        """With the number of output ids that are in it."""
        self.prompt_logprobs: list[pb.TokenLogprob] | None = None
        """Of the prompt's tokens from the second on, those that came; None: none are wanted."""
        if sampling.HasField("prompt_logprobs"):
            self.prompt_logprobs = []
            # All of it is computed, wherever that is: no worker's blocks count.
            self._chain = (0, ())
        self.continued = False
        """The attempt goes on with another one's output."""
        self.cached_tokens = 0
        self.first_token_at = 0.0
        """Monotonic, of whichever attempt brought it; 0: it has not come."""

    @property
    def completion_tokens(self) -> int:
        return len(self.output)

    @property
    def told_together(self) -> bool:
        """Nobody looks at its steps one by one, so the worker may tell several in one."""
        flight = self.flight
        return flight.sent_whole and flight.enough is None and self.held_logprobs is None

    @property
    def chain(self) -> tuple[BlockHash, ...]:
        """Block ids of all that has to be computed before its next token: of the prompt and, of an answer that goes on
        elsewhere, of its output."""
        length, chain = self._chain
        if length != len(self.output):
            flight = self.flight
            chain = flight.model.chain_with(self.prompt, self.output, flight.target.salt)
            self._chain = (len(self.output), chain)
        return chain

    @property
    def ended(self) -> bool:
        return self.failure is not None or self.finish != pb.FINISH_NONE

    @property
    def computed(self) -> bool:
        """Some worker has computed its prompt to the end."""
        return bool(self.first_token_at or (self.submits and self.finish))

    def put(self, step: pb.RequestStep) -> bool:
        """Keep a step for the handler. False: the buffer is full, and the choice has failed."""
        flight, finish = self.flight, step.finish
        if self.prompt_logprobs is not None and step.prompt_logprobs:
            self.prompt_logprobs.extend(step.prompt_logprobs)
            if not (step.token_ids or finish):
                return True
        if flight.sent_whole:
            self.texts.append(step.text)
            if self.held_logprobs is not None:
                self.logprobs.extend(step.logprobs)
        elif finish or self.steps or flight.direct is None or not flight.direct(self, step):
            if not self.steps:
                flight.ready.append(self)
            elif len(self.steps) >= self.buffer_steps:
                self.fail(client_too_slow())
                return False
            self.steps.append(step)
            flight.wake()
        self.output.extend(step.token_ids)
        if self.held_logprobs is not None:
            self.held_logprobs = [*self.held_logprobs[len(step.logprobs) :], *step.held_logprobs]
        # What was cached when the client got its first token counts, whoever goes on.
        if step.HasField("usage") and not self.continued:
            self.cached_tokens = step.usage.cached_tokens
        if finish:
            self.finish = finish
            self.stop_reason = step.stop_reason
            flight.open_choices -= 1
            if not flight.open_choices:
                flight.wake()
        return True

    def score_again(self, sampling: pb.Sampling) -> None:
        """It is submitted, not for the first time perhaps. What came of its prompt counts where it is all of it."""
        if self.prompt_logprobs:
            if len(self.prompt_logprobs) == len(self.prompt.token_ids) - 1:
                sampling.ClearField("prompt_logprobs")
            else:
                self.prompt_logprobs.clear()

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
        sent_whole: bool = False,
        failures: int = 0,
        trail: Trail | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        """`sent_whole`: not streamed. `failures`: of earlier starts of the request. `trail`: where it is told what
        becomes of it."""
        self.ticket = ticket
        self.target = target
        self.model = target.model
        self.prompt_tokens = sum([len(prompt.token_ids) for prompt in prompts])
        self.metrics = metrics
        self.sent_whole = sent_whole
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
        self.scores = sampling.HasField("prompt_logprobs")
        """It tells how likely its prompts are: the answer may be megabytes, and is made in a thread."""
        self.followers: list[Choice] = []
        """Those that have a leader."""
        if choices_per_prompt > 1:
            self._let_the_first_lead(choices_per_prompt)
        self.ready: list[Choice] = []
        """Choices of a streamed answer that have steps to take."""
        self.open_choices = len(self.choices)
        """Those that have not ended."""
        self.direct: Callable[[Choice, pb.RequestStep], bool] | None = None
        """Of a stream that has begun: sends a step on at once, if the client takes it now (`streaming`)."""
        self.enough: Callable[[int, str], bool] | None = None
        """Told each piece of a choice's text, it says whether that was all that is wanted of it."""
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
        self._woken = False
        self._waiter: asyncio.Future[None] | None = None
        """The handler's, which alone waits: an `asyncio.Event` for many costs three times as much."""
        self._gone = False

    def _let_the_first_lead(self, choices_per_prompt: int) -> None:
        """Of each prompt that has a block to share. A shorter one is sooner computed by each."""
        for choice in self.choices:
            first = choice.index - choice.index % choices_per_prompt
            if choice.index != first and choice.prompt.chain:
                choice.leader = self.choices[first]
                self.followers.append(choice)

    @property
    def completion_tokens(self) -> int:
        return sum([len(choice.output) for choice in self.choices])

    @property
    def served_prompt_tokens(self) -> int:
        """Those of prompts that were computed: not of what nobody came to, or left too early."""
        if len(self.choices) == 1:
            return self.prompt_tokens if self.choices[0].computed else 0
        size = self._choices_per_prompt
        groups = (self.choices[start : start + size] for start in range(0, len(self.choices), size))
        return sum(len(group[0].prompt.token_ids) for group in groups if any(choice.computed for choice in group))

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed. Choices of one prompt share it: the one that hit least counts."""
        size = self._choices_per_prompt
        if len(self.choices) == 1:
            return self.choices[0].cached_tokens
        groups = (self.choices[start : start + size] for start in range(0, len(self.choices), size))
        return sum(min(choice.cached_tokens for choice in group) for group in groups)

    def scores_of(self, choice: Choice) -> Sequence[pb.TokenLogprob]:
        """Of the choice's prompt, which were computed once for all its choices."""
        first = self.choices[choice.index - choice.index % self._choices_per_prompt]
        return choice.prompt_logprobs or first.prompt_logprobs or ()

    @property
    def untouched(self) -> bool:
        """Nothing has come for any choice."""
        return all(not choice.output and not choice.ended for choice in self.choices)

    def take_ready(self) -> list[Choice]:
        """The choices that have steps to take, each once."""
        ready, self.ready = self.ready, []
        return ready

    def wake(self) -> None:
        self._woken = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def client_gone(self) -> None:
        self._gone = True
        self.wake()

    def end(self, error: ApiError) -> None:
        """End every choice that has not ended yet."""
        for choice in self.choices:
            choice.fail(error)

    async def wait(self) -> None:
        """Return when something came or failed; of an answer that is sent whole, when it has ended. Raises ClientGone.
        Bounded by the worker's heartbeats and the sweeper's limits, which fail the choices."""
        if not self._woken:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._woken = False
        if self._gone:
            raise ClientGone


def _for_choice(sampling: pb.Sampling, index: int) -> pb.Sampling:
    """Nobody changes it from here on, so the first choice needs no copy."""
    if not index:
        return sampling
    own = pb.Sampling()
    own.CopyFrom(sampling)
    own.choice = index
    if own.max_tokens:
        # The first one has them, and this one may use its blocks.
        own.ClearField("prompt_logprobs")
    return own
