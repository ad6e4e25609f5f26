"""Errors in the words of the API that was asked: OpenAI's everywhere, Anthropic's under /v1/messages.

    OpenAI      {"error": {"message", "type", "param", "code"}}
    Anthropic   {"type": "error", "error": {"type", "message"}, "request_id"}

Which one it is, the path alone says, so that also what fails before anything is read of a request (a missing key, a
method that is not allowed, a body that is too large) is told as its client expects it.
"""

from __future__ import annotations

import msgspec

from antiphon_gateway.errors import ApiError

MESSAGES_PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's, by status; of the others, those below 500 are `invalid_request_error` and the rest `api_error`."""


_NAMES = {"response_format": "output_config.format"}
"""What refusals call a thing by OpenAI's name, and how it is called here."""


class _Error(msgspec.Struct):
    type: str
    message: str


class Envelope(msgspec.Struct, tag="error"):
    error: _Error
    request_id: str


def error_body(error: ApiError, path: str, request_id: str) -> bytes:
    """The body of an answer that is this error."""
    if not _is_anthropic(path):
        return error.to_json()
    kind = _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.param in _NAMES:
        message = message.replace(error.param, _NAMES[error.param])
    return msgspec.json.encode(Envelope(_Error(kind, message), request_id))


def error_event(error: ApiError, path: str, request_id: str) -> bytes:
    """The last event of a stream that failed. Nothing follows that would mean that all is well."""
    name = b"event: error\n" if _is_anthropic(path) else b""
    return name + b"data: " + error_body(error, path, request_id) + b"\n\n"


def _is_anthropic(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
