"""What a Model's status and Events say of the promise and of the autoscaler.

A decision is told when it changes something, and stays until the next one that does: a status that changed with every
look at the load would be no status. What is measured is written by the half minute (`runtime.status_writer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from antiphon_policy.scaling import ScalingAction
from antiphon_policy.scaling.remembered import Told

from antiphon_operator.plan.clock import stamp
from antiphon_operator.plan.observed import AutoscalerView
from antiphon_operator.plan.planned import Announce
from antiphon_operator.plan.state import State
from antiphon_operator.plan.verdict import Verdict
from antiphon_operator.resource.durations import format_duration
from antiphon_operator.resource.reasons import Reason
from antiphon_operator.resource.status import (
    AutoscalerStatus,
    RecommendationStatus,
    ScalingDecisionStatus,
    SlaStatus,
    latency_status,
    shortened,
)

_EVENTS = {
    ScalingAction.ADD: "ScaledUp",
    ScalingAction.REMOVE: "ScaledDown",
    ScalingAction.SWITCH_ROLE: "RolesSwitched",
    ScalingAction.WAKE: "Woken",
    ScalingAction.TO_ZERO: "ScaledToZero",
}
"""Of actions that change sizes."""
_EVENT_CHARACTERS = 1000


def sla_status(state: State) -> SlaStatus | None:
    sla, view = state.model.spec.sla, state.observed.autoscaler
    ttft = latency_status(target=sla.ttft.p95, p95=_text(view.ttft_p95_ms if view else None))
    tpot = latency_status(target=sla.tpot.p95, p95=_text(view.tpot_p95_ms if view else None))
    if ttft is None and tpot is None:
        return None
    if view is None or (view.ttft_p95_ms is None and view.tpot_p95_ms is None):
        return SlaStatus(ttft=ttft, tpot=tpot)
    attainment = "" if view.attainment is None else f"{100.0 * view.attainment:.1f}%"
    window = format_duration(round(view.window_s * 1000))
    return SlaStatus(ttft=ttft, tpot=tpot, attainment=attainment, window=window)


def autoscaler_status(state: State) -> AutoscalerStatus | None:
    view = _view(state)
    if view is None:
        return None
    decision = None
    if view.told is not None:
        decision = ScalingDecisionStatus(
            at=_at(view.told),
            action=view.told.action.value,
            reason=view.told.reason.value,
            sentence=shortened(view.told.sentence),
        )
    sizes = RecommendationStatus(prefill=view.sizes.get("prefill"), decode=view.sizes.get("decode"))
    return AutoscalerStatus(last_decision=decision, recommendation=sizes, advice=shortened(view.advice))


def scaling_limited(state: State) -> Verdict | None:
    """None: the condition says nothing in this mode."""
    if state.model.spec.autoscaling.mode not in ("Advise", "Enforce"):
        return None
    view = _view(state)
    if view is None:
        return Verdict("Unknown", Reason.WAITING, "The autoscaler has not looked at the Model yet.")
    if view.silent:
        return Verdict(
            "Unknown",
            Reason.NO_NEWS,
            "No gateway has told anything lately, so sizes stay as they are: see whether gateways run, and whether "
            "they and the operator reach Redis.",
        )
    if view.limit is not None:
        return Verdict("True", view.limit.reason, view.limit.sentence)
    return Verdict("False", Reason.WITHIN_LIMITS, "Bounds and budget allow what the promise needs.")


def scaled(state: State) -> list[Announce]:
    """The Event of a decision that the status does not tell of yet."""
    view = _view(state)
    if view is None or view.told is None or view.told.action not in _EVENTS:
        return []
    status: Mapping[str, Any] = (state.observed.model.get("status") or {}).get("autoscaler") or {}
    if (status.get("lastDecision") or {}).get("at") == _at(view.told):
        return []
    reason = _EVENTS[view.told.action] if state.model.spec.autoscaling.mode == "Enforce" else "ScalingAdvised"
    return [Announce("Normal", reason, view.told.sentence[:_EVENT_CHARACTERS])]


def _view(state: State) -> AutoscalerView | None:
    return state.observed.autoscaler if state.model.spec.autoscaling.mode in ("Advise", "Enforce") else None


def _at(told: Told) -> str:
    return stamp(datetime.fromtimestamp(told.at_ms / 1000.0, UTC))


def _text(measured_ms: float | None) -> str | None:
    return None if measured_ms is None else format_duration(round(measured_ms))
