"""Streams in which nothing is said for a while are kept alive, as proxies and load balancers drop what is silent.

What is sent means nothing to a client: a comment of server-sent events, or Anthropic's `ping` once its message has
begun. Until the first token a stream has longer to wait (`first_s`): its first comment takes the head of the answer
with it, and from then on a failure is an event and has no status. No stream has a timer: one sweep, which there is
anyway, looks at all of them. A silence is measured to the second.

gRPC keeps its own connections alive, and an answer that is sent whole has nothing to say before it is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from antiphon_gateway.calls import Call
from antiphon_gateway.error_forms import MESSAGES_PATH
from antiphon_gateway.http import Request

COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class KeepAlive:
    """See the module. Owned by the gateway, which sweeps."""

    def __init__(self, interval_s: float, first_s: float) -> None:
        """`interval_s`: a stream that has begun is silent for no longer; 0: nothing is sent. `first_s`: one that has
        not begun; 0: it waits in silence."""
        self._interval_s = interval_s
        self._first_s = first_s if interval_s > 0 else 0.0
        self._waiting: dict[Call, None] = {}
        """Streams whose model has no worker yet."""

    @contextlib.contextmanager
    def waiting(self, call: Call) -> Iterator[None]:
        """While the call waits and is nobody's flight."""
        self._waiting[call] = None
        try:
            yield
        finally:
            del self._waiting[call]

    def sweep(self, now: float) -> None:
        """Look at those that are nobody's flight."""
        for call in self._waiting:
            if call.stream:
                self.look(call.presence.request, now, call.ticket.arrived_at, begun=False)

    def look(self, request: object, now: float, arrived_at: float, *, begun: bool) -> None:
        """At one stream, if it is one of HTTP. `begun`: its client has got something of the answer."""
        if not isinstance(request, Request):
            return
        if request.wrote:
            request.wrote, request.quiet_since = False, now
            return
        patience_s = self._interval_s if request.started else self._first_s
        if 0 < patience_s <= now - (request.quiet_since or arrived_at) and request.takes_more:
            request.break_silence(PING if begun and request.path == MESSAGES_PATH else COMMENT)
            request.quiet_since = now
