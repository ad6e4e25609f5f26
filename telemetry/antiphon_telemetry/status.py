"""The status page of a process that has no HTTP of its own: a very small HTTP/1.1 server on the process's event loop.

    /metrics   Prometheus text, everything registered with `prometheus_client`
    /health    200 while the process runs and its event loop turns
    /ready     200, or 503 with the reason in one line
    /status    JSON: the record that the owner gives
    further    JSON: what the owner has more to show

Owned by the process's entry point, which starts and closes it. Requests are bounded in size, time and number, and
each connection answers one request: probes and scrapers need no more, and a stuck client holds nothing for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

log = logging.getLogger("antiphon.status")

MAX_REQUEST_BYTES = 8192
MAX_CONNECTIONS = 64
REQUEST_DEADLINE_S = 5.0

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    with_body: bool = True

    def encode(self) -> bytes:
        head = (
            f"HTTP/1.1 {self.status} {_REASONS[self.status]}\r\n"
            f"Content-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + (self.body if self.with_body else b"")


class StatusServer:
    """Serves the pages from `start` to `close`.

    `ready` gives (ready, reason). `detail`, and each of the further `pages` (by path), gives a JSON-serialisable
    record, or an awaitable of one where making it takes a while. All are called on the event loop, once per request.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        ready: Callable[[], tuple[bool, str]],
        detail: Callable[[], object],
        pages: Mapping[str, Callable[[], object]] = MappingProxyType({}),
    ) -> None:
        self._host = host
        self._port = port
        self._ready = ready
        self._records = {"/status": detail, **pages}
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises OSError when the port is not to be had."""
        self._server = await asyncio.start_server(
            self._connected, self._host, self._port, limit=MAX_REQUEST_BYTES, reuse_address=True
        )
        self._port = self._server.sockets[0].getsockname()[1]

    @property
    def port(self) -> int:
        """The port it listens on, once started."""
        return self._port

    async def close(self) -> None:
        """Stop listening and end the connections there are. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await server.wait_closed()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._converse(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_DEADLINE_S):
                answer = await self._answer(reader)
                writer.write(answer.encode())
                await writer.drain()
        except TimeoutError:
            with contextlib.suppress(OSError):
                writer.write(_Answer(408, b"the request did not end in time\n").encode())
        except (OSError, asyncio.IncompleteReadError):
            log.debug("a client of the status page went away")
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> _Answer:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _Answer(431, f"a request may have {MAX_REQUEST_BYTES} bytes here\n".encode())
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _Answer(400, b"this is not an HTTP/1.1 request\n")
        method, target = words[0], words[1].split(b"?", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return _Answer(405, b"only GET and HEAD are answered here\n")
        try:
            answer = await self._page(target.decode("latin-1"))
        except Exception:
            log.exception("the status page %r failed", target)
            answer = _Answer(500, b"this page failed; the log says why\n")
        if method == b"HEAD":
            return _Answer(answer.status, answer.body, answer.content_type, with_body=False)
        return answer

    async def _page(self, path: str) -> _Answer:
        match path:
            case "/health":
                return _Answer(200, b"ok\n")
            case "/ready":
                ready, reason = self._ready()
                return _Answer(200 if ready else 503, f"{reason or 'ready'}\n".encode())
            case "/metrics":
                return _Answer(200, generate_latest(), CONTENT_TYPE_LATEST)
            case path if path in self._records:
                record = self._records[path]()
                if inspect.isawaitable(record):
                    record = await record
                return _Answer(200, msgspec.json.encode(record) + b"\n", "application/json")
            case _:
                paths = ", ".join(("/metrics", "/health", "/ready", *self._records))
                return _Answer(404, f"there are {paths}\n".encode())
