"""A proxy that stands before any API server and does to its clients what networks and overloaded servers do.

    faults = Faults(seed=1)
    async with FaultProxy("http://127.0.0.1:8001", faults) as proxy:
        server.write_kubeconfig(path, url=proxy.url)
        faults.script(Fault(status=409), when=Match(verb="patch", resource="statefulsets"), times=2)
        faults.at_random(Chances(too_many_requests=0.05, server_error=0.05, latency_s=(0.0, 0.2)))
        proxy.drop_watches()

A scripted fault is used before chance is asked, in the order in which they were scripted. Watches stream through as
they come. The proxy knows nothing of objects: only methods and paths. It can be paused (connections stay and nothing
answers, as by SIGSTOP) and can refuse connections (as while a server restarts); both end without a trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections import Counter
from dataclasses import dataclass
from typing import Self

import aiohttp
from aiohttp import web

from tests.support.kube.errors import ApiError
from tests.support.kube.faults import Fault, Faults, Seen, seen

_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-authorization"}
    | {"content-length", "content-encoding", "host", "accept-encoding"}
)


@dataclass(frozen=True)
class Upstream:
    """The server behind. `tls` and `token` for one that is reached with credentials of its own."""

    url: str
    tls: ssl.SSLContext | None = None
    token: str = ""


class FaultProxy:
    def __init__(self, upstream: str | Upstream, faults: Faults | None = None, *, host: str = "127.0.0.1") -> None:
        self._upstream = Upstream(upstream) if isinstance(upstream, str) else upstream
        self.faults = faults or Faults()
        self.counts: Counter[str] = Counter()
        """Of requests by what was done to them: `passed`, `429`, `dropped watch`, ..."""
        self._host, self._port = host, 0
        self._going = asyncio.Event()
        self._going.set()
        self._watches: dict[asyncio.Task[web.StreamResponse], Seen] = {}
        self._site: web.TCPSite | None = None
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def open_watches(self) -> int:
        return len(self._watches)

    def pause(self) -> None:
        """Connections stay, nothing goes through, neither requests nor events of watches."""
        self._going.clear()

    def resume(self) -> None:
        self._going.set()

    def drop_watches(self, resource: str = "") -> int:
        """Cut the connections of all watches, or of those of one resource; how many there were."""
        dropped = [task for task, what in self._watches.items() if resource in ("", what.resource)]
        for task in dropped:
            task.cancel()
        return len(dropped)

    async def refuse_connections(self) -> None:
        """Stop listening, and cut what is open, until `accept_connections`."""
        self.drop_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = self._site = None

    async def accept_connections(self) -> None:
        """Listen, at the same port as before."""
        if self._runner is not None:
            return
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2, handler_cancellation=True)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, self._host, self._port, reuse_address=True)
        await self._site.start()
        self._port = self._runner.addresses[0][1]

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        connector = aiohttp.TCPConnector(limit=0, ssl=self._upstream.tls or True)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)
        await self.accept_connections()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.resume()
        await self.refuse_connections()
        if self._session is not None:
            await self._session.close()

    # -- one request

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        await self._going.wait()
        what = seen(request.method, request.path, dict(request.query))
        fault = self.faults.for_request(what)
        if fault.latency_s:
            self.counts["delayed"] += 1
            await asyncio.sleep(fault.latency_s)
        if fault.disconnect:
            self.counts["disconnected"] += 1
            return _cut(request)
        if fault.status:
            self.counts[str(fault.status)] += 1
            return await _gone(request) if what.is_watch and fault.status == 410 else _refusal(fault)
        if what.is_watch:
            return await self._watch(request, what, fault)
        return await self._pass(request, fault)

    async def _pass(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        try:
            async with self._ask(request, await request.read()) as answer:
                body = await answer.read()
        except aiohttp.ClientError:
            self.counts["upstream away"] += 1
            return _cut(request)
        if fault.lose_answer:
            self.counts["lost answer"] += 1
            return _cut(request)
        self.counts["passed"] += 1
        await self._going.wait()
        return web.Response(status=answer.status, body=body, headers=_end_to_end(answer.headers))

    async def _watch(self, request: web.Request, what: Seen, fault: Fault) -> web.StreamResponse:
        stream = asyncio.create_task(self._stream(request, fault))
        self._watches[stream] = what
        try:
            await asyncio.wait({stream})
        finally:
            del self._watches[stream]
            stream.cancel()
            await asyncio.wait({stream})
        if stream.cancelled() or isinstance(stream.exception(), TimeoutError):
            self.counts["dropped watch"] += 1
            return _cut(request)
        if isinstance(stream.exception(), aiohttp.ClientError | ConnectionError):
            self.counts["upstream away"] += 1
            return _cut(request)
        return stream.result()

    async def _stream(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        """Until either side ends, or for as long as the fault says."""
        async with contextlib.AsyncExitStack() as stack:
            answer = await stack.enter_async_context(self._ask(request, b""))
            response = web.StreamResponse(status=answer.status, headers=_end_to_end(answer.headers))
            await response.prepare(request)
            self.counts["watched"] += 1
            await stack.enter_async_context(asyncio.timeout(fault.drop_after_s))
            async for chunk in answer.content.iter_any():
                await self._going.wait()
                await response.write(chunk)
            await response.write_eof()
            return response

    def _ask(self, request: web.Request, body: bytes) -> aiohttp.client._RequestContextManager:
        assert self._session is not None
        headers = _end_to_end(request.headers)
        if self._upstream.token:
            headers["Authorization"] = f"Bearer {self._upstream.token}"
        return self._session.request(
            request.method,
            self._upstream.url.rstrip("/") + request.raw_path,
            data=body or None,
            headers=headers,
            allow_redirects=False,
        )


def _end_to_end(headers: object) -> dict[str, str]:
    items: list[tuple[str, str]] = list(headers.items())  # type: ignore[attr-defined]
    return {name: value for name, value in items if name.lower() not in _HOP_BY_HOP}


def _cut(request: web.Request) -> web.StreamResponse:
    """As a network does: no answer, no last chunk. What is returned reaches nobody."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)


def _refusal(fault: Fault) -> web.Response:
    reasons = {
        409: ("Conflict", "Operation cannot be fulfilled: the object has been modified"),
        410: ("Expired", "The provided continue parameter is too old"),
        429: ("TooManyRequests", "too many requests, please try again later"),
        500: ("InternalError", "Internal error occurred: etcdserver: request timed out"),
        503: ("ServiceUnavailable", "the server is currently unable to handle the request"),
    }
    reason, message = reasons.get(fault.status, ("Unknown", "a fault"))
    headers = {"Retry-After": str(fault.retry_after_s)} if fault.retry_after_s is not None else {}
    return web.json_response(ApiError(fault.status, reason, message).body(), status=fault.status, headers=headers)


async def _gone(request: web.Request) -> web.StreamResponse:
    """How a watch hears that its version is too old: an event, not a status."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    error = ApiError(410, "Expired", "too old resource version: 1 (2)").body()
    await response.write(json.dumps({"type": "ERROR", "object": error}).encode() + b"\n")
    await response.write_eof()
    return response
