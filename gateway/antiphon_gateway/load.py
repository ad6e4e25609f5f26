"""A worker's load as this gateway knows it: what the worker last said, and what was routed to it since.

What was just routed counts at once (a *pledge*), so that a burst does not go to one worker. A pledge ends when the
worker's own figures include it: for the decode worker, with the first figures after it accepted; for a prefill worker,
which the request reaches by way of another, a little later; in any case with the request's first token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from antiphon_policy.routing import WorkerRole, WorkerView

from antiphon_gateway.worker_client import WorkerClient

SUBMIT_WINDOW = 64
"""Requests that a worker may have unanswered: it answers at once, so more would only be refused later."""

REOPEN_AFTER_S = 0.02
"""A worker that refused for want of room is asked again at the earliest then, when its load has changed."""

_REMOTE_SETTLES_S = 0.1


@dataclass(slots=True, eq=False)
class Pledge:
    """What one request adds to one worker."""

    tokens: int
    blocks: int
    decodes: bool
    accepted_at: float | None = None


@dataclass(slots=True, eq=False)
class WorkerLoad:
    client: WorkerClient
    pledges: set[Pledge] = field(default_factory=set)
    unanswered: int = 0
    full_since: float | None = None

    @property
    def open(self) -> bool:
        """Whether one more request may be submitted now."""
        return self.full_since is None and self.unanswered < SUBMIT_WINDOW

    def settle(self, now: float) -> None:
        """The worker said its load: forget the pledges that it includes."""
        if self.pledges:
            self.pledges = {pledge for pledge in self.pledges if not _included(pledge, now)}
        if self.full_since is not None and now - self.full_since >= REOPEN_AFTER_S:
            self.full_since = None

    def view(self, role: WorkerRole, leading_blocks: int) -> WorkerView:
        attachment = self.client.attachment
        if attachment is None:
            raise AssertionError("only attached workers are routed to")
        queue = self.client.queue
        tokens = queue.waiting_tokens
        running = queue.running
        blocks = queue.free_blocks
        for pledge in self.pledges:
            tokens += pledge.tokens
            running += pledge.decodes
            blocks -= pledge.blocks
        return WorkerView(
            worker_id=attachment.worker_id,
            role=role,
            leading_blocks=leading_blocks,
            queued_tokens=tokens,
            running=running,
            kv_tokens=queue.kv_tokens,
            free_blocks=max(0, blocks),
            total_blocks=queue.total_blocks,
            step=self.client.step_model,
            draining=queue.draining,
        )


def _included(pledge: Pledge, now: float) -> bool:
    if pledge.accepted_at is None:
        return False
    return pledge.decodes or now - pledge.accepted_at >= _REMOTE_SETTLES_S
