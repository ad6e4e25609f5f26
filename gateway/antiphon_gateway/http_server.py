"""The HTTP server: listens, runs a handler for each request, ends idle connections, and stops in order.

    serving -> (stop) -> idle connections closed, running answers to their end, bounded -> closed

Owned by the process (`server`) or a test; owns its connections and the task of every handler. What is the same for
all answers of a second (the date, the clock that idle connections are judged by) is made once a second.
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from socket import socket

from antiphon_gateway.http import Request
from antiphon_gateway.protocol import Connection

log = logging.getLogger("antiphon.gateway")

KEEP_ALIVE_S = 75.0
"""A connection without a request, or with half a head of one, is closed after so long."""

BACKLOG = 2048
_TICK_S = 1.0


class HttpServer:
    """See the module."""

    def __init__(self, handler: Callable[[Request], Awaitable[None]], *, last_words_s: float) -> None:
        """`last_words_s`: how long answers may take to end once the server is to stop."""
        self.connections: set[Connection] = set()
        self.started = False
        self.ending = False
        self.now_s = 0.0
        self.date_line = b""
        self._tick()
        self._handler = handler
        self._last_words_s = last_words_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop
        self._stop = asyncio.Event()

    async def serve(self, sockets: Sequence[socket]) -> None:
        """Serve what comes on these listening sockets until `stop` is called."""
        self._loop = asyncio.get_running_loop()
        ticking = asyncio.create_task(self._keep_time(), name="http clock")
        servers = [await self._loop.create_server(self._connect, sock=own, backlog=BACKLOG) for own in sockets]
        self.started = True
        try:
            await self._stop.wait()
            for server in servers:
                server.close()
            await self._end()
        finally:
            ticking.cancel()
            for server in servers:
                server.close()
            for connection in list(self.connections):
                connection.abort()
            await asyncio.gather(ticking, return_exceptions=True)

    def stop(self) -> None:
        self._stop.set()

    async def _end(self) -> None:
        self.ending = True
        for connection in list(self.connections):
            connection.end()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._last_words_s)
        if self._tasks:
            log.warning("%d requests did not end in time; their handlers are cancelled", len(self._tasks))
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connect(self) -> Connection:
        return Connection(self)

    # -- time

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._tick()
            for connection in list(self.connections):
                since_s = connection.idle_since_s
                if since_s is not None and self.now_s - since_s > KEEP_ALIVE_S:
                    # Not `close`, which would wait for a client that leaves the last answer unread.
                    connection.abort()

    def _tick(self) -> None:
        self.now_s = time.monotonic()
        self.date_line = f"date: {email.utils.formatdate(usegmt=True)}\r\n".encode()

    # -- for connections

    def opened(self, connection: Connection) -> None:
        self.connections.add(connection)

    def closed(self, connection: Connection) -> None:
        self.connections.discard(connection)

    def handle(self, request: Request) -> None:
        self._tasks.add(self._loop.create_task(self._run(request)))

    async def _run(self, request: Request) -> None:
        try:
            await self._handler(request)
        except Exception:
            log.exception("a request failed by a fault of this gateway, and so did telling its client")
        finally:
            if not request.answered:
                request.abort()
            # Not by a callback of the task, which is one more thing for the loop to do for each request.
            if (task := asyncio.current_task()) is not None:
                self._tasks.discard(task)
            request.forget()
