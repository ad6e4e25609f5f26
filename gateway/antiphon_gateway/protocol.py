"""uvicorn's HTTP/1.1 protocol with two things added for long streams.

Handlers get the transport (`scope["extensions"]["antiphon.transport"]`), to drop a client that takes no data; and
when a connection is lost, the request that is being answered learns of it even if the client had already sent the
next one behind it (uvicorn tells only the newest).
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class GatewayProtocol(HttpToolsProtocol):  # type: ignore[misc]  # uvicorn is not followed by the type checker
    _active: Any = None

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
