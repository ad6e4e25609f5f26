"""Requests of pages in a browser that come from elsewhere (CORS): allowed by name with `--cors-origin`, or not at all.

A browser sends keys only as the header that the page's script sets, so credentials (cookies) are never allowed, and
`*` is no danger beyond what the key is. Every answer, error or stream, carries the permission; an origin that is not
allowed gets the answer without it, and its browser keeps the answer from the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from antiphon_gateway.client_request import ClientRequest
from antiphon_gateway.http import Header

_ORIGIN = re.compile(r"^[a-z][a-z0-9+.-]*://[^\s/?#,]+$")
_MAX_AGE_S = 600
_EXPOSED = b"x-request-id, x-antiphon-ignored, retry-after"
_VARY: Header = (b"vary", b"origin")


class CorsOriginInvalid(ValueError):
    """What --cors-origin names is no origin; the message says which form it has."""


class CrossOrigin:
    """Which origins may ask. Owned by the gateway."""

    def __init__(self, origins: Sequence[str]) -> None:
        """Raises CorsOriginInvalid."""
        for origin in origins:
            if origin != "*" and not _ORIGIN.match(origin):
                raise CorsOriginInvalid(
                    f"--cors-origin {origin!r}: an origin is scheme://host[:port] in lower case, without a path; or *"
                )
        self._all = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, request: ClientRequest) -> tuple[Header, ...]:
        """For the answer to this request, whatever it is."""
        if self._all:
            return ((b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED))
        origin = request.headers.get(b"origin")
        if origin is None or origin not in self._origins:
            return (_VARY,)
        return ((b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED), _VARY)

    async def answered(self, request: ClientRequest, methods: Iterable[str]) -> bool:
        """Answer it if it is a preflight: a browser asks whether it may ask. `methods`: those that its path has."""
        if request.method != "OPTIONS" or b"access-control-request-method" not in request.headers:
            return False
        allowed: list[Header] = []
        if any(name == b"access-control-allow-origin" for name, _ in request.standing_headers):
            allowed = [
                (b"access-control-allow-methods", ", ".join(methods).encode()),
                (b"access-control-max-age", b"%d" % _MAX_AGE_S),
            ]
            wanted = request.headers.get(b"access-control-request-headers")
            if wanted is not None:
                # Any header may come: what is not known is not looked at.
                allowed.append((b"access-control-allow-headers", wanted))
        await request.respond(200, b"", *allowed)
        return True
