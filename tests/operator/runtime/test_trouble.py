"""What the runtime adds to a status: refusals of the API server, and plans that could not be made."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from antiphon_operator.kube.errors import ApiError, ApiUnavailable, Conflict, Forbidden, Invalid
from antiphon_operator.runtime.applier import Failure
from antiphon_operator.runtime.trouble import (
    RETRY,
    SLOW,
    SOON,
    backoff_for,
    refused,
    with_internal_error,
    with_refusal,
)

from tests.support.kube_objects import model

NOW = datetime(2026, 1, 2, tzinfo=UTC)
THEN = "2026-01-01T00:00:00Z"


def error(kind: type[ApiError], message: str = "exceeded quota") -> ApiError:
    return kind("apply Service chat/qwen", 403, "Forbidden", message)


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(condition for condition in status["conditions"] if condition["type"] == kind)


def ready(status: str) -> dict[str, Any]:
    return {"type": "Ready", "status": status, "reason": "Planned", "message": "as planned", "lastTransitionTime": THEN}


def test_a_model_that_serves_stays_ready_when_something_new_is_refused() -> None:
    failures = [Failure("StatefulSet qwen-decode", error(Forbidden))]
    status = with_refusal({"conditions": [ready("True")], "phase": "Ready"}, model(), failures, NOW)
    assert condition(status, "Ready")["reason"] == "Planned"
    said = condition(status, "RolloutComplete")
    assert (said["status"], said["reason"]) == ("False", "ApplyFailed")
    assert "StatefulSet qwen-decode" in said["message"]
    assert "exceeded quota" in said["message"]
    assert status["phase"] == "Ready"


def test_a_model_that_does_not_serve_says_what_was_refused() -> None:
    failures = [Failure("StatefulSet a", error(Forbidden)), Failure("Service b", error(Invalid))]
    status = with_refusal({"conditions": [ready("False")]}, model(), failures, NOW)
    said = condition(status, "Ready")
    assert (said["status"], said["reason"]) == ("False", "ApplyFailed")
    assert "1 more objects" in said["message"]


def test_a_plan_that_raised_makes_ready_unknown_and_keeps_the_rest() -> None:
    before = {"conditions": [ready("True")], "endpoint": "http://x"}
    live = model(status=before)
    status = with_internal_error(live, ZeroDivisionError("division by zero"), NOW)
    said = condition(status, "Ready")
    assert (said["status"], said["reason"]) == ("Unknown", "InternalError")
    assert "ZeroDivisionError" in said["message"]
    assert said["lastTransitionTime"] == "2026-01-02T00:00:00Z"
    assert status["endpoint"] == "http://x"
    again = with_internal_error(model(status=status), ZeroDivisionError("division by zero"), datetime.now(UTC))
    assert again == status, "said again, it is the same status: nothing is written"


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [((Conflict,), SOON), ((ApiUnavailable, Conflict), RETRY), ((ApiUnavailable, Forbidden), SLOW), ((Invalid,), SLOW)],
)
def test_the_slowest_error_decides_when_to_try_again(kinds: tuple[type[ApiError], ...], expected: object) -> None:
    assert backoff_for([error(kind) for kind in kinds]) is expected


def test_what_the_next_look_mends_is_not_told() -> None:
    failures = [Failure("a", error(ApiUnavailable)), Failure("b", error(Conflict)), Failure("c", error(Forbidden))]
    assert [failure.what for failure in refused(failures)] == ["c"]
