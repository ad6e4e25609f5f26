"""Errors as a call's status: the code that says what a client may do, the sentence, and the rest as trailing metadata.

x-antiphon-error-code, -param, -type    as in HTTP's error object
retry-after                             seconds, as HTTP's header
grpc-retry-pushback-ms                  the same, for clients whose service config retries (gRFC A6)
"""

from __future__ import annotations

import grpc

from antiphon_gateway.errors import ApiError

Metadata = tuple[tuple[str, str], ...]

_STATUSES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_BY_CODE = {"client_too_slow": grpc.StatusCode.RESOURCE_EXHAUSTED}
_MOST_CHARACTERS = 256


def status_of(error: ApiError) -> grpc.StatusCode:
    return _BY_CODE.get(error.code or "") or _STATUSES.get(error.status, grpc.StatusCode.UNKNOWN)


def trailing(error: ApiError) -> Metadata:
    """The metadata that go with its status."""
    told = [("type", error.type), ("code", error.code), ("param", error.param)]
    metadata = [(f"x-antiphon-error-{name}", plain(value)) for name, value in told if value]
    if error.retry_after_s is not None:
        metadata.append(("retry-after", str(error.retry_after_s)))
        metadata.append(("grpc-retry-pushback-ms", str(error.retry_after_s * 1000)))
    return tuple(metadata)


def plain(text: str, most_characters: int = _MOST_CHARACTERS) -> str:
    """As a value of metadata: printable ASCII, and not long. The rest stands as it would in a literal."""
    kept = text[:most_characters].encode("unicode_escape").decode("ascii")
    return kept.strip()
