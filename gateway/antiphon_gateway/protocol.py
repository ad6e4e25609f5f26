"""HTTP/1.1 on a socket: httptools parses, and a `Request` goes to the handler without anything in between.

Written by hand, as a general server spends more on a request than all that the gateway does with it. Owned by the
server (`server`), one for each client connection; the handler of a request runs as a task of the server.

A connection serves one request at a time. What a client sends behind it waits in `pipeline`; a few requests are read
ahead, so that the end of the connection is still seen while the first one is answered. What is read of a body before
a handler asks for it is bounded, and so is the head of a request. A head that cannot be parsed is answered 400, unless
an answer is under way: then the connection is closed, as anything else would end up inside that answer.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
from collections import deque
from typing import Any, Protocol, cast

import httptools

from antiphon_gateway.http import Request

log = logging.getLogger("antiphon.gateway")

MAX_PIPELINED = 8
"""Requests behind the one being answered for which the connection is still read; each may have 64 KiB of body."""

MAX_HEAD_BYTES = 64 * 1024

HIGH_WATER_BYTES = 64 * 1024
"""Of an answer that the client has not taken yet: then its handler waits."""


class Server(Protocol):
    """What a connection needs of its server."""

    date_line: bytes
    now_s: float
    """Monotonic, as of the last tick."""
    ending: bool

    def opened(self, connection: Connection) -> None: ...

    def closed(self, connection: Connection) -> None: ...

    def handle(self, request: Request) -> None:
        """Start to answer it."""


class Connection(asyncio.Protocol):
    """See the module."""

    __slots__ = (
        "_head_bytes",
        "_headers",
        "_in_head",
        "_newest",
        "_parser",
        "_reading",
        "_server",
        "_url",
        "_writable",
        "active",
        "idle_since_s",
        "pipeline",
        "transport",
        "write_paused",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self._parser: Any = httptools.HttpRequestParser(self)
        # A client that says `Connection: close` and sends more is not at fault before its answer is through.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.transport: asyncio.Transport
        self.active: Request | None = None
        """The one that is being answered."""
        self.pipeline: deque[Request] = deque()
        self.write_paused = False
        self.idle_since_s: float | None = server.now_s
        """Monotonic; None while a request is answered. A head that is not complete counts as nothing."""
        self._newest: Request | None = None
        """The one whose body is being read."""
        self._reading = True
        self._writable: asyncio.Future[None] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._url = b""
        self._in_head = True
        self._head_bytes = 0

    # -- for the server

    def abort(self) -> None:
        self.transport.abort()

    def end(self) -> None:
        """Close it now, or after the answer that is under way."""
        if self.active is None:
            self.transport.close()
        else:
            self.active.keep_alive = False

    # -- for requests

    @property
    def date_line(self) -> bytes:
        return self._server.date_line

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    async def drained(self) -> None:
        """Return when the client has taken enough of what was written, or is gone. The sweeper bounds the wait."""
        while self.write_paused:
            self._writable = self._writable or asyncio.get_running_loop().create_future()
            await self._writable

    def resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            self.transport.resume_reading()

    def body_taken(self) -> None:
        """The active request's body is where it is wanted: read on, or the end of the connection would not be seen."""
        if len(self.pipeline) <= MAX_PIPELINED:
            self.resume_reading()

    def answer_ended(self, request: Request) -> None:
        """The answer to the active request has been written. The next one may be there already."""
        self.active = None
        if not request.keep_alive or self._server.ending:
            self.transport.close()
            return
        self.resume_reading()
        if self.pipeline:
            self._begin(self.pipeline.popleft())
        else:
            self.idle_since_s = self._server.now_s

    def _pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self.transport.pause_reading()

    def _begin(self, request: Request) -> None:
        self.active = request
        self.idle_since_s = None
        self._server.handle(request)

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._server.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.closed(self)
        self.resume_writing()
        requests = [*self.pipeline]
        self.pipeline.clear()
        if self.active is not None:
            requests.append(self.active)
        for request in requests:
            request.lose_client()
        # Parser and request know this connection: together they would wait for the collector.
        self._newest = None
        self._parser = None

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._writable is not None:
            if not self._writable.done():
                self._writable.set_result(None)
            self._writable = None

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Another protocol was proposed; the request is answered as if it had not been.
            if self.active is not None:
                self.active.keep_alive = False
        except httptools.HttpParserError:
            self._refuse("This is not HTTP/1.1.")
            return
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(f"The head of a request may have {MAX_HEAD_BYTES} bytes.")

    def _refuse(self, message: str) -> None:
        if self.transport.is_closing():
            return
        if self.active is None:
            body = message.encode()
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
            )
        self.transport.close()

    # -- httptools

    def on_message_begin(self) -> None:
        self._headers = {}
        self._url = b""
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        parser = self._parser
        version = parser.get_http_version()
        request = self._newest = Request(
            self,
            parser.get_method().decode("ascii"),
            _path(self._url),
            self._headers,
            version,
            keep_alive=version == "1.1" and parser.should_keep_alive(),
        )
        if self.active is None:
            self._begin(request)
        else:
            self.pipeline.append(request)
            if len(self.pipeline) > MAX_PIPELINED:
                self._pause_reading()

    def on_body(self, body: bytes) -> None:
        request = self._newest
        if request is not None and not request.answered and not request.take_body(body):
            self._pause_reading()

    def on_message_complete(self) -> None:
        if self._newest is not None:
            self._newest.end_body()
        self._in_head = True


def _path(url: bytes) -> str:
    """Without the query, and decoded. Targets in other forms than a path's are nobody's here."""
    path = url.partition(b"?")[0]
    if not path.startswith(b"/"):
        path = httptools.parse_url(url).path or b""
    text = path.decode("latin-1")
    return urllib.parse.unquote(text) if "%" in text else text
