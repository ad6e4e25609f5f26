"""One HTTP request, as handlers see it: its head, its bounded body, and the answer.

A body is read whole, up to a limit and within a deadline. A client that sends more is heard out for a bounded
further amount, because an answer that meets unread data on the socket is lost to the reset that follows.

The head of an answer leaves together with its first bytes, in one write. Bytes go straight to the connection
(`protocol`): the gateway is the only application there is, so nothing stands between.
"""

from __future__ import annotations

import asyncio
import functools
import http
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from antiphon_gateway import errors
from antiphon_gateway.error_forms import error_body, error_event

if TYPE_CHECKING:
    from antiphon_gateway.protocol import Connection

Header: TypeAlias = tuple[bytes, bytes]

JSON_TYPE: Header = (b"content-type", b"application/json")
EVENT_STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

UNASKED_BODY_BYTES = 64 * 1024
"""So much of a body is taken in before a handler asks for it; then the connection is read no further."""


class ClientGone(Exception):
    """The client closed the connection. Nobody is left to answer."""


class AnswerInvalid(RuntimeError):
    """A fault of a handler: what it wants to send is no HTTP answer; the message says why."""


class Request:
    """See the module. Made by the connection, given to one handler."""

    __slots__ = (
        "_body_ended",
        "_body_limit_bytes",
        "_body_waiter",
        "_chunked",
        "_connection",
        "_expects_continue",
        "_head",
        "_parts",
        "_size_bytes",
        "answered",
        "gone",
        "headers",
        "keep_alive",
        "late_headers",
        "method",
        "on_gone",
        "path",
        "quiet_since",
        "request_id",
        "standing_headers",
        "started",
        "version",
        "wrote",
    )

    def __init__(
        self,
        connection: Connection,
        method: str,
        path: str,
        headers: dict[bytes, bytes],
        version: str = "1.1",
        *,
        keep_alive: bool = True,
    ) -> None:
        """`headers` by their names in lower case."""
        self.method = method
        self.path = path
        self.headers = headers
        self.version = version
        self.keep_alive = keep_alive
        """Whether the connection serves another request after this one."""
        self.request_id = ""
        self.standing_headers: tuple[Header, ...] = ()
        """Further ones for the answer, whatever it is."""
        self.late_headers: Callable[[], tuple[Header, ...]] = tuple
        """Further ones for the answer, as they are when its head is sent."""
        self.started = False
        """Whether the head of the answer is out."""
        self.answered = False
        """Whether the answer has been sent to its end."""
        self.gone = False
        """Whether the client has closed the connection."""
        self.wrote = False
        """Whether anything of the answer was written since somebody last looked (`keep_alive`)."""
        self.quiet_since = 0.0
        """Monotonic, when somebody last saw that it had been; 0: not yet."""
        self.on_gone: Callable[[], None] | None = None
        """Called once when that happens before the answer has ended."""
        self._connection = connection
        self._expects_continue = version == "1.1" and headers.get(b"expect", b"").lower() == b"100-continue"
        """The client waits for a word before it sends its body."""
        self._parts: list[bytes] = []
        self._size_bytes = 0
        self._body_limit_bytes = -1
        """-1: no handler has asked yet."""
        self._body_ended = False
        self._body_waiter: asyncio.Future[None] | None = None
        self._head = b""
        """Of the answer, until its first bytes follow."""
        self._chunked = False

    @property
    def operation(self) -> str:
        """What is asked for, as a trace says it."""
        return f"{self.method} {self.path}"

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    # -- the body

    async def body(self, limit_bytes: int, timeout_s: float) -> bytes:
        """The whole body. Raises ApiError (408, 413, 415) and ClientGone."""
        encoding = self.headers.get(b"content-encoding")
        if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
            raise errors.unsupported_encoding(encoding.decode("latin-1"))
        self._body_limit_bytes = limit_bytes
        if self._expects_continue and int(self.headers.get(b"content-length", 0)) > limit_bytes:
            raise errors.body_too_large(limit_bytes)
        self._forget_excess()
        if not self._body_is_known:
            await self._rest_of_body(timeout_s)
        self._connection.body_taken()
        if self._size_bytes > limit_bytes:
            raise errors.body_too_large(limit_bytes)
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    async def _rest_of_body(self, timeout_s: float) -> None:
        self._connection.resume_reading()
        if self._expects_continue and not self._size_bytes:
            self._expects_continue = False
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(timeout_s):
                while not self._body_is_known:
                    if self.gone:
                        raise ClientGone
                    self._body_waiter = asyncio.get_running_loop().create_future()
                    await self._body_waiter
        except TimeoutError as error:
            raise errors.body_timeout(timeout_s) from error

    @property
    def _body_is_known(self) -> bool:
        """It is there, or so far above the limit that the rest does not matter."""
        return self._body_ended or self._size_bytes > 4 * self._body_limit_bytes >= 0

    def _forget_excess(self) -> None:
        if self._size_bytes > self._body_limit_bytes:
            self._parts.clear()

    def take_body(self, part: bytes) -> bool:
        """For the connection. False: no more is wanted for now."""
        self._size_bytes += len(part)
        self._parts.append(part)
        if self._body_limit_bytes < 0:
            return self._size_bytes <= UNASKED_BODY_BYTES
        self._forget_excess()
        self._wake()
        return True

    def end_body(self) -> None:
        """For the connection: it was the whole body."""
        self._body_ended = True
        self._wake()

    def lose_client(self) -> None:
        """For the connection: it is closed."""
        self.gone = True
        self._wake()
        if self.on_gone is not None and not self.answered:
            self.on_gone()

    def forget(self) -> None:
        """For the server: the handler has ended. What it hung on here would be a cycle for the collector."""
        self.on_gone = None
        self.late_headers = tuple

    def _wake(self) -> None:
        waiter = self._body_waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- the answer

    def start(self, status: int, headers: tuple[Header, ...], *, length_bytes: int | None = None) -> None:
        """The head, which leaves with the first bytes of the body. `length_bytes` None: they come in pieces."""
        if self._expects_continue and not self._size_bytes:
            # Whether the client sends the body that nobody asked for, or its next request, could not be told apart.
            self.keep_alive = False
        head = _status_line(status) + self._connection.date_line
        for name, value in headers + self.standing_headers + self.late_headers():
            if b"\n" in value or b"\r" in value:
                raise AnswerInvalid("a header of the answer has a line break in it")
            if name == b"connection":
                self.keep_alive &= value != b"close"
            else:
                head += name + b": " + value + b"\r\n"
        head += b"x-request-id: " + self.request_id.encode()
        if length_bytes is not None:
            head += b"\r\ncontent-length: %d\r\n" % length_bytes
        elif self.version == "1.1":
            self._chunked = True
            head += b"\r\ntransfer-encoding: chunked\r\n"
        else:
            self.keep_alive = False
            head += b"\r\n"
        self.started = True
        self._head = head + (b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")

    async def send(self, data: bytes, *, last: bool) -> None:
        """Bytes of the body. Waits while the client takes none; does nothing once it has gone."""
        connection = self._connection
        if self.gone:
            return
        if self.method == "HEAD":
            data = b""
        elif self._chunked:
            if data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if last:
                data += b"0\r\n\r\n"
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self.wrote = True
            connection.write(data)
        if connection.write_paused and not last:
            await connection.drained()
        if last and not self.answered:
            self.answered = True
            connection.answer_ended(self)

    @property
    def takes_more(self) -> bool:
        """Whether bytes that are sent now leave now."""
        return not self.gone and not self._connection.write_paused

    def push(self, data: bytes) -> None:
        """Bytes in the middle of a body that has begun."""
        self.wrote = True
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def break_silence(self, data: bytes) -> None:
        """Bytes of an event stream that mean nothing. Its head leaves with them, where it has not left before."""
        if not self.started:
            self.start(200, EVENT_STREAM_HEADERS)
        head, self._head = self._head, b""
        self._connection.write(head + (b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data))

    async def respond(self, status: int, body: bytes, *headers: Header) -> None:
        """A whole answer at once."""
        self.start(status, headers, length_bytes=len(body))
        await self.send(body, last=True)

    async def respond_error(self, error: errors.ApiError, *headers: Header) -> None:
        extra = list(headers)
        if error.retry_after_s is not None:
            extra.append((b"retry-after", str(error.retry_after_s).encode()))
        if error.status == 401:
            extra.append((b"www-authenticate", b"Bearer"))
        if error.status in (408, 413):
            extra.append((b"connection", b"close"))
        await self.respond(error.status, error_body(error, self.path, self.request_id), JSON_TYPE, *extra)

    def error_event(self, error: errors.ApiError) -> bytes:
        """The last event of a stream that has begun and cannot go on."""
        return error_event(error, self.path, self.request_id)

    def abort(self) -> None:
        """Drop the connection without a further word (a client that takes no data)."""
        self._connection.abort()


@functools.cache
def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n".encode()
