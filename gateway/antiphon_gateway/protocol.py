"""uvicorn's HTTP/1.1 protocol with what long answers and a public port need besides.

Handlers get the transport (`scope["extensions"]["antiphon.transport"]`), to drop a client that takes no data. The head
of a request is bounded. And a client that goes away is noticed even if it had already sent its next request behind the
one that is being answered: uvicorn then stops reading, so that it does not see the end of the connection, and would
tell only the newest request.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_PIPELINED = 8
"""Requests behind the one being answered for which the connection is still read; each may have 64 KiB of body."""

MAX_HEAD_BYTES = 64 * 1024


class GatewayProtocol(HttpToolsProtocol):  # type: ignore[misc]  # uvicorn is not followed by the type checker
    _active: Any = None
    _in_head = True
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request may have {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._active = cycle
        cycle.scope["extensions"] = {"antiphon.transport": self.transport}
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        active = self._active
        if active is not None and not active.response_complete:
            active.disconnected = True
            active.message_event.set()
        self._active = None
        super().connection_lost(exc)
