"""An HTTP server that answers as a test tells it, and remembers what it was asked. For the client's side of the API."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from antiphon_operator.kube.access import ClusterAccess
from antiphon_operator.kube.client import KubeClient


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass
class ScriptedApi:
    """Answers from `script`, one each request; the last one again and again."""

    script: list[web.Response | Callable[[Asked], Awaitable[web.Response]]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    url: str = ""

    def then(self, answer: web.Response | Callable[[Asked], Awaitable[web.Response]]) -> ScriptedApi:
        self.script.append(answer)
        return self

    async def handle(self, request: web.Request) -> web.Response:
        raw = await request.read()
        asked = Asked(
            request.method,
            request.path,
            dict(request.query),
            dict(request.headers),
            json.loads(raw) if raw else None,
        )
        self.asked.append(asked)
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, web.Response):
            # A response object can be sent once.
            return web.Response(status=answer.status, body=answer.body, headers=answer.headers.copy())
        return await answer(asked)

    def client(self, **options: Any) -> KubeClient:
        return KubeClient(ClusterAccess(server=self.url), **options)


def ok(body: Any) -> web.Response:
    return web.json_response(body)


def refused(
    status: int, reason: str, message: str, headers: dict[str, str] | None = None, **details: Any
) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": status,
        "details": details,
    }
    return web.json_response(body, status=status, headers=headers)


@contextlib.asynccontextmanager
async def serving(api: ScriptedApi) -> AsyncIterator[ScriptedApi]:
    application = web.Application(client_max_size=1 << 26)
    application.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield api
    finally:
        await runner.cleanup()
