"""What `GET /v1/antiphon/explain/{request_id}` answers, as JSON: a trail with its figures worked out.

Made only when somebody asks. The tenant is not in it. The same structs are read by `antiphon explain`, and `inputs` of
an attempt are what `explain_replay` decides again from. Times are in milliseconds; a figure that is not known is null.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from antiphon_policy.routing import CostParts, RouteOption, RouteRequest, WorkerView, Workload
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.explain import OutcomeState, RouteRecord, Trail

_FINISHES = {pb.FINISH_STOP: "stop", pb.FINISH_LENGTH: "length"}


class Option(msgspec.Struct):
    """A pair of workers with its price. `prefill` null: the decode worker computes the prompt itself."""

    decode: str
    prefill: str | None
    cost_ms: float
    ttft_ms: float
    tpot_ms: float
    keeps_sla: bool
    cost: CostParts


class Holder(msgspec.Struct):
    """A worker that had leading blocks of the prompt."""

    worker: str
    blocks: int


class Decision(msgspec.Struct):
    chosen: Option | None
    """None: the decision has no price."""
    decode: str
    prefill: str | None
    reason: str
    explanation: str
    predicted_ttft_ms: float
    predicted_tpot_ms: float
    blocks: int
    """Full blocks of the prompt that could have been cached."""
    cached_blocks: int
    """Of those, held by the one who computes the prompt."""
    cached_blocks_decode: int
    fallbacks: list[str]
    peers: list[Holder]
    """From whom the missing ones had better be pulled."""
    alternatives: list[Option]


class Link(msgspec.Struct):
    reader: str
    holder: str
    gigabytes_per_s: float


class Inputs(msgspec.Struct):
    """What the decision followed from."""

    request: RouteRequest
    tie_break: float
    workers: list[WorkerView]
    workers_in_all: int
    """Where that is more, only those that the decision names are here."""
    leading: dict[str, int]
    links: list[Link]
    workload: Workload
    excluded: list[str]


class AttemptOutcome(msgspec.Struct):
    """`ttft_ms` counts from the submission, as the prediction does; errors are measured less predicted."""

    state: OutcomeState
    why: str
    accepted_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    ttft_error_ms: float | None
    tpot_error_ms: float | None
    ended_ms: float | None
    tokens: int
    finish: str | None
    cached_tokens: int | None
    prefill_worker: str | None
    """Who computed the prompt, as the decode worker said."""
    pulled_blocks: int | None


class Attempt(msgspec.Struct):
    number: int
    submitted: str
    """UTC."""
    since_arrival_ms: float
    waited_ms: float
    """For this submission: since it was queued, or since the attempt before it ended."""
    revision: str
    prompt_tokens: int
    output_tokens: int
    """That earlier attempts had brought; they are computed again like the prompt."""
    decision: Decision
    outcome: AttemptOutcome
    inputs: Inputs


class ExplainedChoice(msgspec.Struct):
    index: int
    attempts: list[Attempt]
    attempts_left_out: int
    """After the first one: only so many are kept."""


class Explanation(msgspec.Struct):
    request_id: str
    """In the ids of its answer and in the workers' logs."""
    client_request_id: str
    """Its `x-request-id`."""
    gateway: str
    path: str
    model: str
    arrived: str
    """UTC."""
    prepared_ms: float | None
    """From its arrival until it was queued: reading, template, tokenising."""
    took_ms: float | None
    status: int | None
    """Of the answer; null while it is made, and where the client went away."""
    running: bool
    error: str
    choices: list[ExplainedChoice]
    choices_left_out: int


def explain(trail: Trail) -> Explanation:
    """The trail as it is now."""
    ended = trail.ended_at > 0
    return Explanation(
        request_id=trail.request_id,
        client_request_id=trail.client_request_id,
        gateway=trail.gateway_id,
        path=trail.path,
        model=trail.model,
        arrived=_utc(trail.arrived_unix),
        prepared_ms=_ms(trail.arrived_at, trail.queued_at),
        took_ms=_ms(trail.arrived_at, trail.ended_at),
        status=trail.status or None,
        running=not ended,
        error=trail.error,
        choices=[
            ExplainedChoice(index, [_attempt(trail, record) for record in records], trail.attempts_left_out(index))
            for index, records in sorted(trail.choices.items())
        ],
        choices_left_out=len(trail.choices_left_out),
    )


def _attempt(trail: Trail, record: RouteRecord) -> Attempt:
    since_arrival_s = record.submitted_at - trail.arrived_at
    return Attempt(
        number=record.number,
        submitted=_utc(trail.arrived_unix + since_arrival_s),
        since_arrival_ms=round(since_arrival_s * 1e3, 3),
        waited_ms=round((record.submitted_at - record.waiting_since) * 1e3, 3),
        revision=record.revision,
        prompt_tokens=record.inputs.request.prompt_tokens - record.output_tokens,
        output_tokens=record.output_tokens,
        decision=_decision(record),
        outcome=_outcome(record),
        inputs=_inputs(record),
    )


def _decision(record: RouteRecord) -> Decision:
    made = record.decision
    chosen = None
    if made.cost is not None:
        chosen = _option(RouteOption(made.decode, made.prefill, made.cost, made.predicted_tpot_ms, made.keeps_sla))
    return Decision(
        chosen=chosen,
        decode=made.decode,
        prefill=made.prefill,
        reason=made.reason.value,
        explanation=made.explanation,
        predicted_ttft_ms=made.predicted_ttft_ms,
        predicted_tpot_ms=made.predicted_tpot_ms,
        blocks=made.usable_blocks,
        cached_blocks=made.prefill_blocks,
        cached_blocks_decode=made.decode_blocks,
        fallbacks=list(made.prefill_fallbacks),
        peers=[Holder(worker, blocks) for worker, blocks in made.prefix_peers],
        alternatives=[_option(option) for option in made.alternatives],
    )


def _option(option: RouteOption) -> Option:
    cost = option.cost
    return Option(option.decode, option.prefill, cost.total_ms, cost.ttft_ms, option.tpot_ms, option.keeps_sla, cost)


def _outcome(record: RouteRecord) -> AttemptOutcome:
    found = record.outcome
    begin = record.submitted_at
    ttft_ms = _ms(begin, found.first_token_at)
    own_tokens = max(0, found.tokens - record.output_tokens)
    tpot_ms = None
    if found.ended_at and own_tokens > 1:
        tpot_ms = round((found.last_token_at - found.first_token_at) * 1e3 / (own_tokens - 1), 3)
    decision = record.decision
    said = found.usage_is_known
    return AttemptOutcome(
        state=found.state,
        why=found.why,
        accepted_ms=_ms(begin, found.accepted_at),
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        ttft_error_ms=None if ttft_ms is None else round(ttft_ms - decision.predicted_ttft_ms, 3),
        tpot_error_ms=None if tpot_ms is None else round(tpot_ms - decision.predicted_tpot_ms, 3),
        ended_ms=_ms(begin, found.ended_at),
        tokens=own_tokens,
        finish=_FINISHES.get(found.finish),
        cached_tokens=found.cached_tokens if said else None,
        prefill_worker=(found.prefill_worker_id or decision.decode) if said else None,
        pulled_blocks=found.pulled_blocks if said else None,
    )


def _inputs(record: RouteRecord) -> Inputs:
    given = record.inputs
    return Inputs(
        request=given.request,
        tie_break=given.tie_break,
        workers=list(given.workers),
        workers_in_all=record.workers,
        leading=dict(given.leading),
        links=[Link(reader, holder, speed) for (reader, holder), speed in given.links.items()],
        workload=given.workload,
        excluded=list(given.excluded),
    )


def _ms(begin: float, end: float) -> float | None:
    """Between two monotonic times; None where the later one has not come."""
    return round((end - begin) * 1e3, 3) if end else None


def _utc(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
