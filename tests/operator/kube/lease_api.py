"""Just enough of an API server for one Lease: versions, conflicts, and times when it does not answer.

It judges nothing: whoever has the newest resourceVersion may write. So what it remembers is what the holders did.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

_LEASES = "/apis/coordination.k8s.io/v1/namespaces/antiphon/leases"


class LeaseApi:
    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.holders: list[str] = []
        """Each change of holder, in order; empty for a release."""
        self.writes = 0
        self.other_writes: list[str] = []
        """Changes of anything but the Lease: by whom."""
        self.answering = asyncio.Event()
        self.answering.set()
        self._version = 0

    @property
    def holder(self) -> str:
        return str(self.lease["spec"].get("holderIdentity") or "") if self.lease else ""

    def touch(self) -> None:
        """Somebody annotates the Lease."""
        assert self.lease is not None
        self._store({**self.lease, "metadata": {**self.lease["metadata"], "annotations": {"looked": "at"}}})

    def take(self, identity: str) -> None:
        """Somebody else takes the Lease, whatever stands there."""
        assert self.lease is not None
        self._store({**self.lease, "spec": {**self.lease["spec"], "holderIdentity": identity, "acquireTime": "other"}})

    def _store(self, lease: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        self.lease = {**lease, "metadata": {**lease["metadata"], "resourceVersion": str(self._version)}}
        if not self.holders or self.holders[-1] != self.holder:
            self.holders.append(self.holder)
        return self.lease

    async def handle(self, request: web.Request) -> web.Response:
        await self.answering.wait()
        if not request.path.startswith(_LEASES):
            self.other_writes.append((await request.json())["metadata"]["name"])
            return web.json_response({"metadata": {}})
        if request.method == "GET":
            return web.json_response(self.lease) if self.lease else _refused(404, "NotFound")
        self.writes += 1
        body = json.loads(await request.read())
        if request.method == "POST":
            return _refused(409, "AlreadyExists") if self.lease else web.json_response(self._store(body), status=201)
        if self.lease is None:
            return _refused(404, "NotFound")
        if body["metadata"].get("resourceVersion") != self.lease["metadata"]["resourceVersion"]:
            return _refused(409, "Conflict")
        return web.json_response(self._store(body))


def _refused(status: int, reason: str) -> web.Response:
    return web.json_response({"kind": "Status", "reason": reason, "message": reason}, status=status)


@contextlib.asynccontextmanager
async def serving(api: LeaseApi, folder: Path) -> AsyncIterator[str]:
    """The path of a kubeconfig for it."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    path = folder / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c"}}],
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}],
            }
        )
    )
    try:
        yield str(path)
    finally:
        api.answering.set()
        await runner.cleanup()
