"""A worker's load as this gateway knows it: what the worker last said, and what was routed to it since.

What was just routed counts at once (a *pledge*), so that a burst does not go to one worker. A pledge ends when the
worker's own figures include it: for the decode worker, with the first figures after it accepted; for a prefill worker,
which the request reaches by way of another, a little later; in any case with the request's first token. What nobody
confirms ends by itself after `confirmed_in_s`, so that a lost word never makes a worker look busy for ever.

A worker that has more to do than its horizon is given nothing more (`holding`), but not for longer than what it had
to do was predicted to take: if nothing was sent to it meanwhile and it still has as much, then others fill it, or its
figures stand still, and it gets the next request all the same.

A worker that never said how fast it computes is held back only for what it says itself that waits: nobody knows how
long it takes for what was just routed to it, and the one thing worse than too much is a fleet that is kept idle.

Between two reports the prompt tokens that wait on a worker are taken to become fewer as its own step model says. So a
worker that reports seldom looks idle when it is, and one that says nothing at all looks idle, not full.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon_policy.holding import LEAST_HORIZON_MS, hold_ms, horizon_ms, prompt_tokens_per_ms
from antiphon_policy.latency import CHUNK_TOKENS, StepModel
from antiphon_policy.routing import WorkerRole, WorkerView

from antiphon_gateway.worker_client import WorkerClient

SUBMIT_WINDOW = 64
"""Requests that a worker may have unanswered: it answers at once, so more would only be refused later."""

REOPEN_AFTER_S = 0.02
"""A worker that refused for want of room is asked again at the earliest then, when its load has changed."""

_REMOTE_SETTLES_S = 0.1
_MEAN_OF = 8.0
"""Round trips and times between reports are means over about so many."""


@dataclass(slots=True, eq=False)
class Pledge:
    """What one request adds to one worker."""

    tokens: int
    blocks: int
    decodes: bool
    made_at: float
    accepted_at: float | None = None


class WorkerLoad:
    """See the module. Times are monotonic seconds."""

    def __init__(self, client: WorkerClient, now: float, *, confirmed_in_s: float) -> None:
        """`confirmed_in_s`: a pledge that the worker's figures have not taken up by then never will be. The worker says
        its load with each heartbeat, and is lost after `--lost-after-ms` without one: twice that is ample."""
        attachment = client.attachment
        if attachment is None:
            raise AssertionError("only attached workers have a load")
        self.client = client
        self.worker_id = attachment.worker_id
        self.role = attachment.role
        self.group = attachment.group
        self.pledges: dict[Pledge, None] = {}
        """In the order in which they were made. Only `pledge` and `release` change them, and the sums with them."""
        self._pledged_tokens = self._pledged_blocks = self._pledged_decodes = 0
        self.confirmed_in_s = confirmed_in_s
        self.unanswered = 0
        self.full_since: float | None = None
        self.said_at = now
        """When its figures are from."""
        self.says_its_speed = client.queue.HasField("step_model")
        """Else it is priced by a model that nobody measured."""
        self.round_trip_ms = 0.0
        """From submitting to its answer."""
        self.report_ms = 0.0
        """Between two reports while it has work."""
        self._kept_until: float | None = None
        """While nothing is given to it: when what it had to do should be done."""
        self._rated: tuple[StepModel, int, float] | None = None

    @property
    def open(self) -> bool:
        """Whether one more request may be submitted now."""
        return self.full_since is None and self.unanswered < SUBMIT_WINDOW

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one of its steps at most."""
        return self.client.queue.chunk_tokens or CHUNK_TOKENS

    @property
    def tokens_per_ms(self) -> float:
        """Prompt tokens that it computes, by its step model."""
        step, chunk_tokens = self.client.step_model, self.chunk_tokens
        if self._rated is None or self._rated[0] is not step or self._rated[1] != chunk_tokens:
            self._rated = (step, chunk_tokens, prompt_tokens_per_ms((step,), chunk_tokens=chunk_tokens))
        return self._rated[2]

    @property
    def horizon_ms(self) -> float:
        """It is given new work only while it has less than that to do (`antiphon_policy.holding`)."""
        return horizon_ms(
            self.client.step_model,
            round_trip_ms=self.round_trip_ms,
            report_ms=self.report_ms,
            chunk_tokens=self.chunk_tokens,
        )

    def settle(self, now: float) -> None:
        """The worker said its load: forget the pledges that it includes, and those that nobody confirmed."""
        queue = self.client.queue
        if queue.running or queue.waiting_tokens or self.pledges:
            self.report_ms += ((now - self.said_at) * 1e3 - self.report_ms) / _MEAN_OF
        self.said_at = now
        self.says_its_speed |= queue.HasField("step_model")
        if self.pledges:
            for pledge in [pledge for pledge in self.pledges if self._included(pledge, now)]:
                self.release(pledge)
        if self.full_since is not None and now - self.full_since >= REOPEN_AFTER_S:
            self.full_since = None

    def takes_role(self, role: WorkerRole) -> None:
        """The worker changed it. What was sent to it in the old one still counts, until it is confirmed or ends."""
        self.role = role
        self.full_since = None
        self._kept_until = None

    def answered(self, after_s: float) -> None:
        """It took or refused a request, so long after that was sent."""
        self.unanswered -= 1
        self.round_trip_ms += (after_s * 1e3 - self.round_trip_ms) / _MEAN_OF

    def queued_tokens(self, now: float) -> int:
        """Prompt tokens that it still has to compute, by what is known."""
        routed = self._routed_tokens(now) if self._pledged_tokens else 0
        return self._said_tokens(now) + routed

    def _said_tokens(self, now: float) -> int:
        """Of what it said itself, what should be left."""
        said = self.client.queue.waiting_tokens
        return max(0, said - int((now - self.said_at) * 1e3 * self.tokens_per_ms)) if said else 0

    def _routed_tokens(self, now: float) -> int:
        """Of what was pledged, without what nobody confirmed in time."""
        oldest = next(iter(self.pledges), None)
        if oldest is None or now - oldest.made_at < self.confirmed_in_s:
            return self._pledged_tokens
        return sum([pledge.tokens for pledge in self.pledges if now - pledge.made_at < self.confirmed_in_s])

    def queue_ms(self, now: float) -> float:
        return self.ms_of(self.queued_tokens(now))

    def ms_of(self, prompt_tokens: int) -> float:
        """How long it takes to compute so many."""
        return self.client.step_model.prefill_ms(new_tokens=prompt_tokens, chunk_tokens=self.chunk_tokens)

    def keeps_back(self, queue_ms: float, now: float) -> float:
        """For how many milliseconds a request is held that would find so much to do here; 0: it should be sent."""
        held_ms = 0.0
        # No horizon is shorter, and most find less.
        if queue_ms > LEAST_HORIZON_MS:
            if not self.says_its_speed:
                queue_ms = min(queue_ms, self.ms_of(self._said_tokens(now)))
            held_ms = hold_ms(queue_ms, self.horizon_ms)
        if held_ms <= 0.0:
            self._kept_until = None
            return 0.0
        if self._kept_until is None:
            self._kept_until = now + queue_ms / 1e3
        return 0.0 if now >= self._kept_until else held_ms

    def pledge(self, pledge: Pledge) -> None:
        """A request was sent here."""
        self.pledges[pledge] = None
        self._pledged_tokens += pledge.tokens
        self._pledged_blocks += pledge.blocks
        self._pledged_decodes += pledge.decodes
        if pledge.tokens:
            self._kept_until = None

    def release(self, pledge: Pledge) -> None:
        """It counts no more. Idempotent."""
        if pledge in self.pledges:
            del self.pledges[pledge]
            self._pledged_tokens -= pledge.tokens
            self._pledged_blocks -= pledge.blocks
            self._pledged_decodes -= pledge.decodes

    def view(self, now: float, *, draining: bool) -> WorkerView:
        """`draining`: it gets nothing new, whoever said so."""
        queue = self.client.queue
        return WorkerView(
            worker_id=self.worker_id,
            role=self.role,
            leading_blocks=0,
            queued_tokens=self.queued_tokens(now),
            running=queue.running + self._pledged_decodes,
            kv_tokens=queue.kv_tokens,
            free_blocks=max(0, queue.free_blocks - self._pledged_blocks),
            total_blocks=queue.total_blocks,
            step=self.client.step_model,
            draining=draining or queue.draining,
            may_decode=self.open,
            empty_blocks=max(0, queue.empty_blocks - self._pledged_blocks),
            chunk_tokens=self.chunk_tokens,
        )

    def _included(self, pledge: Pledge, now: float) -> bool:
        if now - pledge.made_at >= self.confirmed_in_s:
            return True
        if pledge.accepted_at is None:
            return False
        return pledge.decodes or now - pledge.accepted_at >= _REMOTE_SETTLES_S
