"""Why a request went where it went: what was decided, from what, and what came of it.

A *trail* follows one request through this gateway. Each time one of its choices is submitted to a worker, the trail
gets a `RouteRecord`: the decision with its inputs, frozen, and beside it the `Outcome`, which the dispatcher fills in
as it hears of it. A trail belongs to its flight; `explain_store` remembers the last ones, for whoever asks.

The idea: routing has made all these objects anyway, so nothing is computed here, only kept. Text, JSON and figures are
made when somebody asks (`explain_document`). Nothing of prompts and answers is kept, only their lengths.
"""

from __future__ import annotations

import enum
import functools
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from antiphon_policy.routing import RouteDecision, RouteRequest, WorkerView, Workload
from antiphon_proto import worker_pb2 as pb

if TYPE_CHECKING:
    from antiphon_gateway.explain_store import ExplainStore
    from antiphon_gateway.flight import Choice, Ticket

ATTEMPTS_KEPT = 8
"""Of one choice: the first and the last ones. One that is refused for want of room again and again has many."""

CHOICES_KEPT = 16
"""Of one request, with attempts."""

WORKERS_KEPT = 64
"""Of more, only those that the decision names are kept."""

TRAIL_BYTES = 1200
RECORD_BYTES = 2600
WORKER_BYTES = 450
LEADING_BYTES = 120
LINK_BYTES = 150
"""What these take in memory, about."""

_NOT_A_WORD = re.compile(r"[^A-Za-z0-9._:/-]")

Links: TypeAlias = Mapping[tuple[str, str], float]
"""(reader, holder) -> GB/s."""


class OutcomeState(enum.Enum):
    """What has become of an attempt."""

    SUBMITTED = "submitted"
    """Sent to the worker, which has not answered yet."""
    ACCEPTED = "accepted"
    """It runs."""
    REFUSED = "refused"
    FAILED = "failed"
    """The worker failed on it, or was lost with it."""
    MOVED = "moved"
    """The worker gave it back in good order, to be continued elsewhere."""
    FINISHED = "finished"
    STALLED = "stalled"
    """Nothing came for too long."""
    WITHDRAWN = "withdrawn"
    """The client went away, or another choice of the request failed."""


class RouteInputs(msgspec.Struct, frozen=True, gc=False):
    """All that a decision follows from (`explain_replay` makes it again)."""

    request: RouteRequest
    tie_break: float
    workers: tuple[WorkerView, ...]
    """In the order in which they were asked about."""
    leading: Mapping[str, int]
    """Worker id -> leading blocks of the request's chain that it held, as far as the gateway knew."""
    links: Links
    workload: Workload
    excluded: tuple[str, ...] = ()
    """Of the workers, those that had to have no part in it."""

    @property
    def size_bytes(self) -> int:
        """About, without the links: many records share their table."""
        return RECORD_BYTES + WORKER_BYTES * len(self.workers) + LEADING_BYTES * len(self.leading)

    def cut_down(self, decision: RouteDecision) -> RouteInputs:
        """Only the workers that the decision names, in their order, and the links between them."""
        named = {decision.decode, *decision.prefill_fallbacks}
        if decision.prefill is not None:
            named.add(decision.prefill)
        named.update(holder for holder, _ in decision.prefix_peers)
        for option in decision.alternatives:
            named.update((option.decode, option.prefill or option.decode))
        return RouteInputs(
            self.request,
            self.tie_break,
            tuple([worker for worker in self.workers if worker.worker_id in named]),
            {worker_id: self.leading[worker_id] for worker_id in named if worker_id in self.leading},
            {
                (reader, holder): self.links[reader, holder]
                for reader in named
                for holder in named
                if (reader, holder) in self.links
            },
            self.workload,
            tuple(name for name in self.excluded if name in named),
        )


class Outcome(msgspec.Struct):
    """What an attempt came to. Times are monotonic; 0: it has not happened."""

    state: OutcomeState = OutcomeState.SUBMITTED
    why: str = ""
    """Of a refusal, a move or a failure, in the worker's words."""
    accepted_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    ended_at: float = 0.0
    tokens: int = 0
    """That the choice had at the end, with those of earlier attempts."""
    finish: pb.Finish.ValueType = pb.FINISH_NONE
    usage_is_known: bool = False
    """The worker has said what follows."""
    cached_tokens: int = 0
    prefill_worker_id: str = ""
    """Who computed the prompt; empty: it did so itself."""
    pulled_blocks: int = 0

    def accepted(self, now: float) -> None:
        self.state = OutcomeState.ACCEPTED
        self.accepted_at = now

    def began(self, step: pb.RequestStep, now: float) -> None:
        """The first step with a token."""
        self.first_token_at = now
        self._take(step)

    def finished(self, step: pb.RequestStep) -> None:
        """The last step."""
        self.finish = step.finish
        self._take(step)

    def end(self, state: OutcomeState, now: float, why: str, tokens: int, heard_at: float) -> None:
        """The attempt is over, with so many tokens of the choice, the last of them at `heard_at`."""
        self.state = state
        self.ended_at = now
        self.why = why
        self.tokens = tokens
        self.last_token_at = heard_at

    def _take(self, step: pb.RequestStep) -> None:
        if step.HasField("usage"):
            usage = step.usage
            self.usage_is_known = True
            self.cached_tokens = usage.cached_tokens
            self.prefill_worker_id = usage.prefill_worker_id
            self.pulled_blocks = usage.pulled_blocks


class RouteRecord(msgspec.Struct, frozen=True, gc=False):
    """One choice given to one worker. All but `outcome` is as it was at that moment."""

    choice: int
    number: int
    """Of the choice's attempts, from 1."""
    submitted_at: float
    """Monotonic."""
    waiting_since: float
    """Monotonic: when it was queued, or its previous attempt ended."""
    revision: str
    output_tokens: int
    """That earlier attempts had brought."""
    inputs: RouteInputs
    workers: int
    """There were so many, before the inputs were cut down."""
    decision: RouteDecision
    outcome: Outcome

    def header(self) -> bytes:
        """The value of `x-antiphon-route`; its grammar is in docs/explain.md."""
        decision = self.decision
        parts = [f"decode={word(decision.decode)}"]
        if decision.prefill is not None:
            parts.append(f"prefill={word(decision.prefill)}")
        parts.append(
            f"reason={decision.reason.value};cached={decision.prefill_blocks}/{decision.usable_blocks}"
            f";ttft-ms={decision.predicted_ttft_ms:.1f};tpot-ms={decision.predicted_tpot_ms:.1f}"
        )
        if self.number > 1:
            parts.append(f"attempt={self.number}")
        return ";".join(parts).encode()


class Trail:
    """One request, from its arrival on. `ExplainStore.keep` makes it known to those who ask."""

    __slots__ = (
        "_left_out",
        "arrived_at",
        "arrived_unix",
        "choices",
        "choices_left_out",
        "client_request_id",
        "ended_at",
        "error",
        "gateway_id",
        "model",
        "path",
        "queued_at",
        "request_id",
        "size_bytes",
        "status",
        "store",
        "tenant",
    )

    def __init__(self, ticket: Ticket, client_request_id: str = "", path: str = "", gateway_id: str = "") -> None:
        self.request_id = ticket.request_id
        self.client_request_id = client_request_id
        self.path = path
        self.gateway_id = gateway_id
        self.tenant = ticket.tenant
        self.arrived_at = ticket.arrived_at
        self.arrived_unix = time.time() - (time.monotonic() - ticket.arrived_at)
        self.model = ""
        self.queued_at = 0.0
        """Monotonic, of the last start; 0: it never came so far."""
        self.choices: dict[int, list[RouteRecord]] = {}
        """Their attempts, by the choice's index."""
        self.choices_left_out: set[int] = set()
        self.status = 0
        """Of the answer; 0 while it is made, and where the client went away."""
        self.error = ""
        self.ended_at = 0.0
        self.size_bytes = TRAIL_BYTES
        """About, without tables of links, which are shared."""
        self.store: ExplainStore | None = None
        """That keeps it at the moment."""
        self._left_out: dict[int, int] = {}

    def queued(self, model: str) -> None:
        """The request was understood, and its choices are about to wait for a worker."""
        self.model = model
        self.queued_at = time.monotonic()

    def submitted(self, choice: Choice, inputs: RouteInputs, decision: RouteDecision) -> RouteRecord:
        """A choice was given to a worker; the record, whose outcome is to be filled in."""
        attempts = self.choices.get(choice.index)
        now = time.monotonic()
        workers = len(inputs.workers)
        if workers > WORKERS_KEPT:
            inputs = inputs.cut_down(decision)
        since = attempts[-1].outcome.ended_at if attempts else self.queued_at or self.arrived_at
        record = RouteRecord(
            choice.index,
            choice.submits,
            now,
            since,
            choice.group.revision,
            len(choice.output),
            inputs,
            workers,
            decision,
            Outcome(),
        )
        if attempts is None:
            if len(self.choices) >= CHOICES_KEPT:
                self.choices_left_out.add(choice.index)
                return record
            attempts = self.choices[choice.index] = []
        grown = inputs.size_bytes
        dropped: Links | None = None
        if len(attempts) >= ATTEMPTS_KEPT:
            old = attempts.pop(1).inputs
            self._left_out[choice.index] = self._left_out.get(choice.index, 0) + 1
            grown -= old.size_bytes
            dropped = old.links
        attempts.append(record)
        self.size_bytes += grown
        if self.store is not None:
            self.store.grew(grown, links=inputs.links, dropped=dropped)
        return record

    def attempts_left_out(self, choice: int) -> int:
        return self._left_out.get(choice, 0)

    def end(self, status: int, error: str) -> None:
        """The request is over. Status 0: with nobody to answer."""
        self.status = status
        self.error = error
        self.ended_at = time.monotonic()

    def current(self) -> RouteRecord | None:
        """The last attempt of the first choice."""
        attempts = self.choices.get(0)
        return attempts[-1] if attempts else None

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """For the head of an answer, as things stand now."""
        gateway = (b"x-antiphon-gateway", self.gateway_id.encode())
        record = self.current()
        return (gateway,) if record is None else (gateway, (b"x-antiphon-route", record.header()))


@functools.lru_cache(maxsize=4096)
def word(text: str) -> str:
    """`text` as a value in the header: at most 64 characters of letters, digits and `._:/-`."""
    return _NOT_A_WORD.sub("_", text[:64])
