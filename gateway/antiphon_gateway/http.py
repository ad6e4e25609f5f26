"""The little HTTP that the gateway needs above ASGI: reading a bounded body, sending answers.

A body is read whole, up to a limit and within a deadline. A client that sends more is heard out for a bounded
further amount, because an answer that meets unread data on the socket is lost to the reset that follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from antiphon_gateway import errors

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Header: TypeAlias = tuple[bytes, bytes]

JSON_TYPE: Header = (b"content-type", b"application/json")
EVENT_STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientGone(Exception):
    """The client closed the connection. Nobody is left to answer."""


class Request:
    """One HTTP request: its head, and its body on demand."""

    __slots__ = ("_receive", "headers", "late_headers", "method", "path", "request_id", "scope", "send", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self.scope = scope
        self.send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = request_id
        self.late_headers: Callable[[], tuple[Header, ...]] = tuple
        """Further ones for the answer, as they are when its head is sent."""
        self.started = False
        """Whether the head of the answer is out."""
        self._receive = receive

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    async def body(self, limit_bytes: int, timeout_s: float) -> bytes:
        """The whole body. Raises ApiError (408, 413, 415) and ClientGone."""
        encoding = self.header(b"content-encoding").strip().lower()
        if encoding not in ("", "identity"):
            raise errors.unsupported_encoding(encoding)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read(limit_bytes)
        except TimeoutError as error:
            raise errors.body_timeout(timeout_s) from error

    async def _read(self, limit_bytes: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            more = message.get("more_body", False)
            size += len(part)
            if size <= limit_bytes:
                parts.append(part)
            else:
                parts.clear()
            if size > 4 * limit_bytes:
                break
        if size > limit_bytes:
            raise errors.body_too_large(limit_bytes)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def disconnected(self) -> None:
        """Return when the client has gone. Only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: tuple[Header, ...]) -> None:
        head = [*headers, *self.late_headers(), (b"x-request-id", self.request_id.encode())]
        self.started = True
        await self.send({"type": "http.response.start", "status": status, "headers": head})

    async def respond(self, status: int, body: bytes, *headers: Header) -> None:
        """A whole answer at once."""
        await self.start(status, (*headers, (b"content-length", str(len(body)).encode())))
        await self.send({"type": "http.response.body", "body": body})

    async def respond_error(self, error: errors.ApiError, *headers: Header) -> None:
        extra = list(headers)
        if error.retry_after_s is not None:
            extra.append((b"retry-after", str(error.retry_after_s).encode()))
        if error.status == 401:
            extra.append((b"www-authenticate", b"Bearer"))
        if error.status in (408, 413):
            extra.append((b"connection", b"close"))
        await self.respond(error.status, error.to_json(), JSON_TYPE, *extra)

    def abort(self) -> None:
        """Drop the connection without a further word (a client that takes no data)."""
        transport = self.scope.get("extensions", {}).get("antiphon.transport")
        if transport is not None:
            transport.abort()
