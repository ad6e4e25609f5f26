"""What the gateway knows of one client's request, whichever way it came: by HTTP (`http`) or by gRPC (`grpc_front`).

Bodies and answers are JSON here, and pieces of a stream are server-sent events: there is one reading of parameters and
one rendering of answers. A way in that speaks otherwise translates at its own edge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from antiphon_gateway.errors import ApiError
from antiphon_gateway.http import Header


class ClientHead(Protocol):
    """What comes before the body."""

    headers: dict[bytes, bytes]
    """By their names in lower case."""

    def header(self, name: bytes) -> str:
        """Empty where it is not there."""


class ClientRequest(ClientHead, Protocol):
    """See the module. Made by the way in, given to one handler; `http.Request` says what each member is."""

    method: str
    path: str
    """Of gRPC's: that of its twin."""
    request_id: str
    standing_headers: tuple[Header, ...]
    late_headers: Callable[[], tuple[Header, ...]]
    started: bool
    gone: bool
    on_gone: Callable[[], None] | None

    @property
    def operation(self) -> str:
        """What is asked for, as a trace says it."""

    @property
    def takes_more(self) -> bool: ...

    async def body(self, limit_bytes: int, timeout_s: float) -> bytes: ...

    def start(self, status: int, headers: tuple[Header, ...], *, length_bytes: int | None = None) -> None: ...

    async def send(self, data: bytes, *, last: bool) -> None: ...

    def push(self, data: bytes) -> None: ...

    async def respond(self, status: int, body: bytes, *headers: Header) -> None: ...

    async def respond_error(self, error: ApiError, *headers: Header) -> None: ...

    def error_event(self, error: ApiError) -> bytes:
        """What ends a stream that has begun and cannot go on."""

    def abort(self) -> None: ...
