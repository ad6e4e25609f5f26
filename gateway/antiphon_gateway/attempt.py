"""One choice on one worker, from when it is sent until it is over."""

from __future__ import annotations

import time
from typing import Protocol

from antiphon_policy.admission import Entry
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.explain import Outcome
from antiphon_gateway.flight import Choice
from antiphon_gateway.load import Pledge, WorkerLoad
from antiphon_gateway.metrics import MoveReason


class AttemptOwner(Protocol):
    """Whoever sent it, and hears what becomes of it."""

    def accepted(self, attempt: Attempt) -> None: ...

    def refused(self, attempt: Attempt, reason: pb.RefusalReason.ValueType, message: str) -> None: ...

    def stepped(self, attempt: Attempt, step: pb.RequestStep) -> None: ...

    def failed(self, attempt: Attempt, why: str, reason: MoveReason) -> None: ...


class Attempt:
    """One choice on one worker: the `Submission` that the worker's stream calls."""

    __slots__ = (
        "_owner",
        "answered",
        "choice",
        "entry",
        "heard_at",
        "load",
        "outcome",
        "pledges",
        "predicted_ttft_ms",
        "ref",
        "sent_at",
    )

    def __init__(self, owner: AttemptOwner, entry: Entry[Choice], load: WorkerLoad, outcome: Outcome) -> None:
        self.entry = entry
        """Its place in the queue, where it goes back to."""
        self.choice = entry.key
        self.load = load
        self.outcome = outcome
        self.predicted_ttft_ms = 0.0
        """From being sent to its first token, when it was routed."""
        self.pledges: tuple[tuple[WorkerLoad, Pledge], ...] = ()
        self.ref = 0
        self.answered = False
        self.heard_at = self.sent_at = time.monotonic()
        self._owner = owner

    def accepted(self) -> None:
        self._owner.accepted(self)

    def refused(self, reason: pb.RefusalReason.ValueType, message: str) -> None:
        self._owner.refused(self, reason, message)

    def step(self, step: pb.RequestStep) -> None:
        self._owner.stepped(self, step)

    def lost(self, why: str) -> None:
        self._owner.failed(self, f"the stream to it broke ({why})", MoveReason.LOST)
