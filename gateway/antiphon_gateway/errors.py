"""Errors as clients see them: OpenAI's shape, a status, and what to do next in the message.

`ApiError` is the only error that a handler lets out on purpose; anything else is a bug of ours and becomes a plain
500 whose details stand in the log only. A `param` is named only where the request itself is at fault.
"""

from __future__ import annotations

import msgspec


class _Body(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Envelope(msgspec.Struct):
    error: _Body


class ApiError(Exception):
    """An answer other than 200. `retry_after_s` is set where the same request may succeed later or elsewhere."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def to_json(self) -> bytes:
        return msgspec.json.encode(Envelope(_Body(self.message, self.type, self.param, self.code)))


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request is at fault and will never be served as it is."""
    return ApiError(400, message, type="invalid_request_error", param=param, code=code)


def context_too_long(*, limit: int, prompt_tokens: int, max_tokens: int, param: str) -> ApiError:
    """400: prompt and answer do not fit the model's context together."""
    message = (
        f"This model's maximum context length is {limit} tokens, but {prompt_tokens + max_tokens} were requested "
        f"({prompt_tokens} in the prompt, {max_tokens} for the answer). Shorten the prompt or the answer."
    )
    return invalid(message, param=param, code="context_length_exceeded")


def unauthorized() -> ApiError:
    return ApiError(
        401,
        "A valid API key is needed, as the header Authorization: Bearer KEY, or x-api-key: KEY.",
        type="authentication_error",
        code="invalid_api_key",
    )


def model_not_found(model: str) -> ApiError:
    return ApiError(
        404,
        f"The model {model[:200]!r} does not exist here. GET /v1/models lists those that do.",
        type="invalid_request_error",
        param="model",
        code="model_not_found",
    )


def unknown_url(method: str, path: str) -> ApiError:
    return ApiError(
        404, f"Unknown request URL: {method} {path[:200]}", type="invalid_request_error", code="unknown_url"
    )


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    return ApiError(
        405,
        f"{method} is not allowed for {path[:200]}; use {allowed}.",
        type="invalid_request_error",
        code="method_not_allowed",
    )


def body_timeout(timeout_s: float) -> ApiError:
    return ApiError(
        408,
        f"The request body did not arrive within {timeout_s:g} s.",
        type="invalid_request_error",
        code="request_timeout",
    )


def body_too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than the {limit_bytes} bytes that this gateway takes (--max-body-bytes).",
        type="invalid_request_error",
        code="request_too_large",
    )


def unsupported_encoding(encoding: str) -> ApiError:
    return ApiError(
        415,
        f"Content-Encoding {encoding[:50]!r} is not supported; send the body as it is.",
        type="invalid_request_error",
        code="unsupported_encoding",
    )


def busy_with_grammars(deadline_s: float) -> ApiError:
    return ApiError(
        503,
        f"The gateway has more grammars and schemas to check than it could in {deadline_s:g} s. Try again in a moment.",
        type="server_error",
        code="overloaded",
        retry_after_s=1,
    )


GRAMMAR_FAILED = "structured output failed"
"""How a worker's message begins where a grammar that compiles turned out to be too much in the middle."""


def grammar_failed(detail: str) -> ApiError:
    """400: the grammar or schema compiles, but keeping to it takes more than a token may take."""
    return invalid(f"{detail}. Use a simpler grammar or schema.", code="grammar_too_complex")


NOTHING_LEFT = "no token may be sampled"
"""How a worker's message begins where what a request allows and forbids leaves nothing."""


def nothing_left(detail: str) -> ApiError:
    """400: it would end the same way on any worker."""
    return invalid(f"{detail}. Allow more, or forbid less.", code="nothing_left_to_sample")


def queue_full(limit: int, *, retry_after_s: int = 1) -> ApiError:
    return ApiError(
        429,
        f"All workers are busy and as much waits already as may wait ({limit} choices). Try again in"
        f" {retry_after_s} s.",
        type="rate_limit_error",
        code="queue_full",
        retry_after_s=retry_after_s,
    )


def too_many_held(model: str, limit: int, *, retry_after_s: int) -> ApiError:
    """429: the model is starting, and enough requests wait for it."""
    return ApiError(
        429,
        f"The model {model[:200]!r} has no worker yet: it is starting, and as many requests wait for that as may wait"
        f" ({limit}, or fewer long ones). Try again in {retry_after_s} s.",
        type="rate_limit_error",
        code="queue_full",
        retry_after_s=retry_after_s,
    )


def deadline_unreachable(predicted_s: float, timeout_s: float, *, retry_after_s: int) -> ApiError:
    """429: by prediction the client will have given up before its first token."""
    return ApiError(
        429,
        f"All workers are busy: the answer would begin in about {predicted_s:.1f} s, and this request gives up after"
        f" {timeout_s:g} s (x-request-timeout-ms). Try again in {retry_after_s} s, or allow more time.",
        type="rate_limit_error",
        code="deadline_unreachable",
        retry_after_s=retry_after_s,
    )


def queue_timeout(timeout_s: float, *, retry_after_s: int = 2) -> ApiError:
    return ApiError(
        503,
        f"No worker had room within {timeout_s:g} s. Try again later.",
        type="server_error",
        code="queue_timeout",
        retry_after_s=retry_after_s,
    )


def no_worker(model: str, detail: str = "", *, retry_after_s: int = 2) -> ApiError:
    """503: the model is known, but nobody can serve it now."""
    return ApiError(
        503,
        f"No worker serves the model {model[:200]!r} at the moment{': ' + detail if detail else ''}. Try again later.",
        type="server_error",
        code="no_worker",
        retry_after_s=retry_after_s,
    )


def draining() -> ApiError:
    return ApiError(
        503,
        "This gateway is shutting down. Send the request again; another one will take it.",
        type="server_error",
        code="draining",
        retry_after_s=1,
    )


def worker_failed(detail: str, *, tokens_sent: bool) -> ApiError:
    """A worker failed on this request or went away. Without tokens, the same request may be sent again."""
    if tokens_sent:
        return ApiError(
            502,
            f"The worker failed in the middle of the answer: {detail}",
            type="server_error",
            code="worker_failed",
        )
    return ApiError(
        503,
        f"The worker failed before the answer began: {detail}. The request may be sent again.",
        type="server_error",
        code="worker_failed",
        retry_after_s=1,
    )


def cut_off(why: str) -> ApiError:
    """502: the answer has begun, its worker gave it up in good order, and nobody can go on with it."""
    return ApiError(
        502,
        f"The answer had to leave its worker ({why}), and no other worker can go on with it. Send the request again.",
        type="server_error",
        code="answer_cut_off",
    )


def moved_too_often(moves: int, why: str) -> ApiError:
    return ApiError(
        502,
        f"The request went from worker to worker {moves} times and was not answered; the last one: {why}. Send it"
        " again when the workers are steady.",
        type="server_error",
        code="moved_too_often",
    )


def stalled(timeout_s: float) -> ApiError:
    return ApiError(
        504,
        f"No token came for {timeout_s:g} s; the request was cancelled.",
        type="server_error",
        code="stalled",
        retry_after_s=1,
    )


def client_too_slow() -> ApiError:
    return ApiError(
        503,
        "The client read the stream too slowly; what it had not read outgrew the buffer and the request was cancelled.",
        type="server_error",
        code="client_too_slow",
    )


def internal() -> ApiError:
    return ApiError(
        500,
        "The gateway failed on this request; its log says why, under the x-request-id of this answer.",
        type="server_error",
        code="internal_error",
    )
