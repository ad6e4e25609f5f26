"""The double as an HTTP server: `async with KubeServer() as server:` and a kubeconfig that leads to it.

Plain HTTP on a loopback address, with bearer tokens; a wrong one is refused, none at all is `anonymous` (kubectl sends
its token over TLS only). Everybody may do everything: nothing is checked against RBAC, but every request is recorded
with its user. The server lives in the test's event loop, which may look at `server.api` at any time. What goes wrong
inside is a 500 to the client and stands in `failures`, which a test should find empty.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Self

import yaml
from aiohttp import web

from tests.support.kube import discovery, openapi
from tests.support.kube.api import Api
from tests.support.kube.endpoints import Asked, answer, handle, watch_of
from tests.support.kube.errors import ApiError
from tests.support.kube.paths import target_of
from tests.support.kube.requests import Request, RequestLog
from tests.support.kube.watch import Watch

COLLECT_AFTER_S = 0.05
"""A real garbage collector acts a moment after the fact, and so does this one."""
_LARGEST_BODY = 8 << 20
_FIRST_USER = "test-admin"
ANONYMOUS = "anonymous"


class KubeServer:
    """`port` 0 takes any free one. Stopping ends all watches."""

    def __init__(self, api: Api | None = None, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.api = api or Api(later=self._later)
        self.failures: list[Exception] = []
        self._host, self._port = host, port
        self._users = {f"token-of-{_FIRST_USER}": _FIRST_USER}
        self._watches: set[Watch] = set()
        self._stack = contextlib.AsyncExitStack()

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def requests(self) -> RequestLog:
        return self.api.requests

    def token(self, user: str = _FIRST_USER) -> str:
        """A bearer token of the user, good from now on."""
        token = f"token-of-{user}"
        self._users[token] = user
        return token

    def write_kubeconfig(
        self, path: Path, *, user: str = _FIRST_USER, url: str = "", namespace: str = "default"
    ) -> Path:
        """`url` of a proxy that stands before this server; by default the server's own."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "double", "cluster": {"server": url or self.url}}],
            "users": [{"name": user, "user": {"token": self.token(user)}}],
            "contexts": [{"name": "double", "context": {"cluster": "double", "user": user, "namespace": namespace}}],
            "current-context": "double",
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(config))
        return path

    def drop_watches(self) -> int:
        """End every watch now; how many there were. Clients may come again."""
        dropped = list(self._watches)
        for watch in dropped:
            watch.end()
        return len(dropped)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            app = web.Application(client_max_size=_LARGEST_BODY)
            app.router.add_route("*", "/{path:.*}", self._serve)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, self._host, self._port, reuse_address=True)
            await site.start()
            self._port = runner.addresses[0][1]
            stack.callback(self.drop_watches)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # -- one request

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path in ("/healthz", "/livez", "/readyz"):
            return web.Response(text="ok")
        credentials = request.headers.get("Authorization")
        user = self._users.get(credentials.removeprefix("Bearer ")) if credentials else ANONYMOUS
        if user is None:
            return answer(401, ApiError(401, "Unauthorized", "Unauthorized").body())
        try:
            return await self._answered(request, user)
        except ApiError as error:
            return answer(error.status, error.body())
        except Exception as error:  # noqa: BLE001 - as a real server answers; the test finds it in `failures`
            self.failures.append(error)
            why = f"Internal error occurred: {type(error).__name__}: {error}"
            return answer(500, ApiError(500, "InternalError", why).body())

    async def _answered(self, request: web.Request, user: str) -> web.StreamResponse:
        """Raises ApiError where nothing is served at the path."""
        path = request.path
        found = discovery.document(self.api.registry, path) or openapi.document(self.api.registry, path)
        if found is not None and request.method == "GET":
            return answer(200, found)
        asked = Asked(
            request.method,
            target_of(self.api.registry, path),
            dict(request.query),
            request.content_type,
            await request.read(),
            request.headers.get("Accept", ""),
            request.headers.get("User-Agent", ""),
        )
        code = 500
        try:
            if asked.verb == "watch":
                watch = watch_of(self.api, asked)
                code = 200
            else:
                response = handle(self.api, asked)
                code = response.status
                return response
        except ApiError as error:
            code = error.status
            return answer(code, error.body())
        finally:
            self._record(asked, user, code)
        return await self._stream(request, watch)

    async def _stream(self, request: web.Request, watch: Watch) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        self._watches.add(watch)
        try:
            await response.prepare(request)
            await watch.run(response)
        except ConnectionError:
            pass  # The client has gone.
        finally:
            self._watches.discard(watch)
        return response

    def _record(self, asked: Asked, user: str, code: int) -> None:
        target = asked.target
        self.api.requests.add(
            Request(
                verb=asked.verb,
                group=target.resource.group,
                resource=target.resource.plural,
                subresource=target.subresource,
                namespace=target.namespace or "",
                name=target.name,
                user=user,
                user_agent=asked.user_agent,
                manager=asked.manager,
                code=code,
            )
        )

    def _later(self, action: Callable[[], None]) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            action()
            return
        loop.call_later(COLLECT_AFTER_S, self._guarded, action)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - nobody waits for the collector; the test finds it in `failures`
            self.failures.append(error)
