"""What the operator says of a Model and of a Pool, as types: the planner fills them, the CRDs describe them.

What is not known is left out of the JSON rather than shown as nothing. Two texts (`summary`) repeat what other fields
say, because a printer column of kubectl can show one field only.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from antiphon_operator.resource.base import Resource, about, plain
from antiphon_operator.resource.reasons import ConditionType, Phase, Reason

Time = Annotated[str, Meta(max_length=32)]
"""RFC 3339, in UTC."""
_Text = Annotated[str, Meta(max_length=253)]
_Count = Annotated[int, Meta(ge=0, le=1000)]
_MESSAGE_CHARACTERS = 4096


class Condition(Resource, frozen=True, kw_only=True):
    """One condition, of the shape that `kubectl wait --for=condition=...` reads."""

    type: Annotated[ConditionType, about("What the condition is about.")]
    status: Annotated[Literal["True", "False", "Unknown"], about("True, False or Unknown.")]
    reason: Annotated[Reason, about("Why, in one word for machines.")]
    message: Annotated[
        str, about("Why, in a sentence for people, with the next step.", max_length=_MESSAGE_CHARACTERS)
    ] = ""
    last_transition_time: Annotated[Time, about("When `status` last changed.")]
    observed_generation: Annotated[int, about("metadata.generation that this was said of.", ge=0)] = 0


class RevisionStatus(Resource, frozen=True, kw_only=True):
    """Revisions of the Model: one while nothing rolls out, two meanwhile."""

    current: Annotated[_Text, about("Revision that the spec asks for.")] = ""
    previous: Annotated[_Text, about("Revision that is being replaced; absent when none is.")] = ""


class ResolvedStatus(Resource, frozen=True, kw_only=True):
    """What names in the spec stand for."""

    model_revision: Annotated[_Text, about("Commit of the weights.")] = ""
    image: Annotated[str, about("Worker image of the current revision.", max_length=512)] = ""


class PoolSummary(Resource, frozen=True, kw_only=True):
    """One pool in the Model's status. Made by `pool_summary`."""

    desired: Annotated[int, about("Replicas that there should be.", ge=0)] = 0
    ready: Annotated[int, about("Replicas that are ready, of all revisions.", ge=0)] = 0
    draining: Annotated[int, about("Replicas that finish their requests before they go.", ge=0)] = 0
    gpus: Annotated[int, about("Devices that the replicas hold.", ge=0)] = 0
    reason: Annotated[Reason, about("Why the pool is as it is.")] = Reason.STARTING
    summary: Annotated[_Text, about("ready/desired, for kubectl's table.")] = ""


class LatencyStatus(Resource, frozen=True, kw_only=True):
    """One promise, and what was measured. Made by `latency_status`."""

    target: Annotated[_Text, about("What is promised for 95 of 100 requests; absent: nothing.")] = ""
    p95: Annotated[_Text, about("What 95 of 100 requests kept, lately; absent: not known.")] = ""
    summary: Annotated[_Text, about("measured/promised, for kubectl's table.")] = ""


class SlaStatus(Resource, frozen=True, kw_only=True):
    """The promise."""

    ttft: Annotated[LatencyStatus | None, about("Time to first token.")] = None
    tpot: Annotated[LatencyStatus | None, about("Time per output token after the first.")] = None
    attainment: Annotated[
        _Text,
        about(
            "Requests of the window that were served inside both promises, of those that an idle worker could have "
            "served so, such as 98.7%; absent: not known."
        ),
    ] = ""
    window: Annotated[_Text, about("What time the measured figures are of, such as 5m.")] = ""


class ScalingDecisionStatus(Resource, frozen=True, kw_only=True):
    """What the autoscaler decided last that changed anything."""

    at: Annotated[Time, about("When.")] = ""
    action: Annotated[
        _Text, about("What: none, add, remove, switch_role, wake, to_zero or freeze. Under Advise: what it would do.")
    ] = ""
    reason: Annotated[_Text, about("Why, in one word for machines.")] = ""
    sentence: Annotated[str, about("Why, with the numbers that it was decided by.", max_length=_MESSAGE_CHARACTERS)] = (
        ""
    )


class RecommendationStatus(Resource, frozen=True, kw_only=True):
    """Replicas that the autoscaler wants now."""

    prefill: Annotated[_Count | None, about("Absent: aggregated serving.")] = None
    decode: Annotated[_Count | None, about("Of the decode pool.")] = None


class AutoscalerStatus(Resource, frozen=True, kw_only=True):
    """The autoscaler."""

    last_decision: Annotated[ScalingDecisionStatus | None, about("The last decision that changed anything.")] = None
    recommendation: Annotated[RecommendationStatus | None, about("Replicas that it wants now.")] = None
    advice: Annotated[
        str,
        about("What a person could do that the autoscaler cannot; absent: nothing.", max_length=_MESSAGE_CHARACTERS),
    ] = ""


class PoolsStatus(Resource, frozen=True, kw_only=True):
    """The pools."""

    prefill: Annotated[PoolSummary | None, about("Absent: aggregated serving.")] = None
    decode: Annotated[PoolSummary | None, about("The decode pool.")] = None


class ModelStatus(Resource, frozen=True, kw_only=True):
    """What is."""

    observed_generation: Annotated[int, about("metadata.generation that this status is about.", ge=0)] = 0
    phase: Annotated[Phase | None, about("One word for people. Decide by the conditions.")] = None
    endpoint: Annotated[str, about("Base URL for clients; the Model is one of `names` there.", max_length=512)] = ""
    revision: Annotated[RevisionStatus | None, about("Revisions of the Model.")] = None
    resolved: Annotated[ResolvedStatus | None, about("What names in the spec stand for.")] = None
    pools: Annotated[PoolsStatus | None, about("The pools.")] = None
    sla: Annotated[SlaStatus | None, about("The latency promised, and kept.")] = None
    autoscaler: Annotated[AutoscalerStatus | None, about("Absent in the modes Disabled and External.")] = None
    conditions: Annotated[tuple[Condition, ...], about("What holds, why not, and what to do.", max_length=16)] = ()
    effective: Annotated[dict[str, Any], about("The spec with every default worked out.")] = field(default_factory=dict)


class PoolStatus(Resource, frozen=True, kw_only=True):
    """What is, of a Pool object."""

    observed_generation: Annotated[int, about("metadata.generation that this status is about.", ge=0)] = 0
    replicas: Annotated[int, about("Replicas that exist and are not about to go.", ge=0)] = 0
    ready_replicas: Annotated[int, about("Replicas that are ready.", ge=0)] = 0
    selector: Annotated[
        str, about("Label selector of the replicas' first pods, for whoever scales the pool.", max_length=1024)
    ] = ""
    draining: Annotated[int, about("Replicas that finish their requests before they go.", ge=0)] = 0
    failures: Annotated[int, about("Replicas that failed to start, one after the other.", ge=0)] = 0
    next_attempt_at: Annotated[Time, about("When the next try is made, after failures.")] = ""
    reason: Annotated[Reason | None, about("Why the pool is as it is.")] = None


def pool_summary(
    *, desired: int, ready: int, draining: int = 0, gpus: int = 0, reason: Reason = Reason.ALL_READY
) -> PoolSummary:
    """With its text for kubectl's table."""
    return PoolSummary(
        desired=desired, ready=ready, draining=draining, gpus=gpus, reason=reason, summary=f"{ready}/{desired}"
    )


def latency_status(*, target: str | None, p95: str | None) -> LatencyStatus | None:
    """With its text for kubectl's table: `480ms/500ms`, `-/500ms` before anything was measured, `480ms` without a
    promise. None where there is neither."""
    if not target and not p95:
        return None
    summary = f"{p95 or '-'}/{target}" if target else f"{p95}"
    return LatencyStatus(target=target or "", p95=p95 or "", summary=summary)


def shortened(message: str) -> str:
    """A message that fits into a condition."""
    return message if len(message) <= _MESSAGE_CHARACTERS else message[: _MESSAGE_CHARACTERS - 3] + "..."


def to_json(status: ModelStatus | PoolStatus) -> dict[str, Any]:
    """As it is written to the API server: what is not known is left out; 0 and False are kept."""
    raw = plain(status)
    return {key: pruned for key, value in raw.items() if (pruned := _known(key, value)) not in (None, "", {})}


def _known(key: str, value: Any) -> Any:
    """Without what is not known. Conditions are whole by convention, and the effective spec is echoed as it is."""
    if isinstance(value, dict) and key != "effective":
        return {name: pruned for name, inner in value.items() if (pruned := _known(name, inner)) not in (None, "", {})}
    return value
