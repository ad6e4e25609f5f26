"""What the API server refused, or why it could not be asked: as types, each saying what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

_SHOWN_CHARACTERS = 400


class KubeError(Exception):
    """Anything that keeps the operator from the API. The message says what to do."""


class AccessError(KubeError):
    """The kubeconfig or the service account cannot be used."""


class NotLeader(KubeError):
    """Another operator may act by now: this process must change nothing any more."""


class ApiError(KubeError):
    """The answer to one request was a refusal. `message` is the API server's own."""

    outcome: ClassVar[str] = "refused"
    """For the metric."""
    advice: ClassVar[str] = ""

    def __init__(self, request: str, status: int, reason: str, message: str, retry_after_s: float | None = None):
        advice = f" ({self.advice})" if self.advice else ""
        super().__init__(f"{request}: {message}{advice}")
        self.request = request
        self.status = status
        """HTTP status; 0: there was no answer."""
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


class NotFound(ApiError):
    outcome = "not_found"


class Conflict(ApiError):
    outcome = "conflict"
    advice = "somebody changed it meanwhile: read it anew and decide again"


class AlreadyExists(ApiError):
    outcome = "already_exists"


class Invalid(ApiError):
    outcome = "invalid"
    advice = "what was sent is not valid: correct the Model, or its podTemplate, as the message says"


class Forbidden(ApiError):
    outcome = "forbidden"
    advice = "a quota or an admission rule says no, or the operator's role lacks this verb: see the message"


class Unauthorized(ApiError):
    outcome = "unauthorized"
    advice = "the credentials are not accepted: renew the kubeconfig's or the service account's token"


class Gone(ApiError):
    outcome = "gone"
    advice = "the list is too old to be continued: list anew"


class ApiUnavailable(ApiError):
    """No answer, or one that says "not now". Trying again later is right; `retry_after_s` says when, if it was said."""

    outcome = "unavailable"
    advice = "the API server cannot answer now: it is tried again"


class Throttled(ApiUnavailable):
    """429."""

    outcome = "throttled"


_BY_STATUS: Mapping[int, type[ApiError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: Throttled,
}


@dataclass(frozen=True, slots=True)
class _Refusal:
    reason: str
    message: str
    retry_after_s: float | None


def refusal(request: str, status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """The error that an answer with this status is. `request` names what was asked, such as `apply Service chat/x`."""
    said = _read(status, headers, body)
    kind = _BY_STATUS.get(status, ApiUnavailable if status >= 500 else ApiError)
    if said.reason == "AlreadyExists":
        kind = AlreadyExists
    return kind(request, status, said.reason, said.message, said.retry_after_s)


def _read(status: int, headers: Mapping[str, str], body: bytes) -> _Refusal:
    """A `Status` object; from what stands before an API server, any text."""
    try:
        parsed: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        parsed = None
    told = parsed if isinstance(parsed, dict) else {}
    text = str(told.get("message") or body.decode("utf-8", "replace").strip() or f"HTTP status {status}")
    details = told.get("details") if isinstance(told.get("details"), dict) else {}
    assert isinstance(details, dict)
    return _Refusal(
        reason=str(told.get("reason") or ""),
        message=text[:_SHOWN_CHARACTERS],
        retry_after_s=_seconds(headers.get("Retry-After")) or _seconds(details.get("retryAfterSeconds")),
    )


def _seconds(said: object) -> float | None:
    """The API server says whole seconds; dates, which HTTP allows too, are left."""
    try:
        seconds = float(str(said))
    except ValueError:
        return None
    return seconds if 0 < seconds < 86_400 else None
