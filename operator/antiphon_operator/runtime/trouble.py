"""What the runtime itself has to tell in a Model's status: a plan that could not be made, or not be carried out.

The planner writes all conditions. Only these two are the runtime's, because the planner cannot know them: it raised, or
the API server refused what it wants. The planner's words stay wherever they are still true: a Model that serves goes
on being Ready when a new object of it is refused, and `RolloutComplete` says what was refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from antiphon_operator.kube.errors import Conflict, Forbidden, Invalid, NotFound
from antiphon_operator.plan.observed import Object
from antiphon_operator.resource.reasons import ConditionType, Reason
from antiphon_operator.runtime.applier import Failure
from antiphon_operator.runtime.objects import metadata
from antiphon_operator.runtime.queue import Backoff

_LONGEST_MESSAGE = 1024

SOON = Backoff(first_s=0.05, longest_s=2.0)
"""Somebody else wrote at the same moment."""
RETRY = Backoff(first_s=0.5, longest_s=30.0)
"""The server could not answer now."""
SLOW = Backoff(first_s=5.0, longest_s=300.0)
"""The server understood and refused: nothing will change before a person, a quota or a grant does."""
BROKEN = Backoff(first_s=2.0, longest_s=300.0)
"""The planner raised."""


def backoff_for(errors: Sequence[Exception]) -> Backoff:
    """The slowest that one of them asks for."""
    if any(isinstance(error, Forbidden | Invalid | NotFound) for error in errors):
        return SLOW
    if all(isinstance(error, Conflict) for error in errors):
        return SOON
    return RETRY


def refused(failures: Sequence[Failure]) -> list[Failure]:
    """Those that belong into the status: not the ones that the next look will mend."""
    return [failure for failure in failures if isinstance(failure.error, Forbidden | Invalid | NotFound)]


def with_refusal(status: Mapping[str, Any], live: Object, failures: Sequence[Failure], now: datetime) -> dict[str, Any]:
    """The planner's status, plus what the API server refused."""
    first = failures[0]
    more = f" ({len(failures) - 1} more objects were refused)" if len(failures) > 1 else ""
    message = f"{first.what} was refused: {first.error}{more}"[:_LONGEST_MESSAGE]
    conditions = list(status.get("conditions") or ())
    conditions = _with(conditions, live, ConditionType.ROLLOUT_COMPLETE, "False", Reason.APPLY_FAILED, message, now)
    ready = next((condition for condition in conditions if condition.get("type") == "Ready"), None)
    if ready is not None and ready.get("status") != "True":
        conditions = _with(
            conditions, live, ConditionType.READY, str(ready.get("status")), Reason.APPLY_FAILED, message, now
        )
    return {**status, "conditions": conditions}


def with_internal_error(live: Object, error: BaseException, now: datetime) -> dict[str, Any]:
    """The status as it stands, but that nobody can tell whether the Model is ready."""
    status: Mapping[str, Any] = live.get("status") or {}
    message = (
        f"The operator failed on this Model ({type(error).__name__}: {error}). Its pods are left as they are; it tries "
        "again by itself. The operator's log has the details; changing what was changed last may help."
    )[:_LONGEST_MESSAGE]
    conditions = _with(
        list(status.get("conditions") or ()), live, ConditionType.READY, "Unknown", Reason.INTERNAL_ERROR, message, now
    )
    return {**status, "conditions": conditions}


def _with(
    conditions: list[Any], live: Object, kind: ConditionType, status: str, reason: Reason, message: str, now: datetime
) -> list[Any]:
    """`conditions`, where the one of this kind says this. Its transition time moves only when its status does."""
    known = (live.get("status") or {}).get("conditions") or ()
    before: Mapping[str, Any] = next((condition for condition in known if condition.get("type") == kind), {})
    moved = before.get("status") != status or "lastTransitionTime" not in before
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ") if moved else before["lastTransitionTime"]
    said = {
        "type": kind.value,
        "status": status,
        "reason": reason.value,
        "message": message,
        "observedGeneration": metadata(live).get("generation", 0),
        "lastTransitionTime": stamp,
    }
    if any(condition.get("type") == kind for condition in conditions):
        return [said if condition.get("type") == kind else condition for condition in conditions]
    return [*conditions, said]
