"""The limit: a kopf operator that does the same writing and no thinking.

It watches the kinds that the operator watches, with the same selectors, and keeps what it sees, one parsed object
each. When a Model comes, it applies a canned set of children with the Model's name put in, and writes one status: as
many bytes to as many objects as the operator writes at first, sixteen requests at once, with nothing rendered,
compared, remembered or looked at twice. It is started like the operator and ignores the options it does not know.

    python -m benchmarks.operator.bare --kubeconfig FILE --ready-file FILE --children FILE
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import kopf
from antiphon_operator.kube.kubeconfig import find_access
from antiphon_operator.kube.resources import MODELS, resource_of
from antiphon_operator.runtime.handlers import watch_settings
from antiphon_operator.runtime.kinds import watched_kinds

Object = dict[str, Any]
NAME = "model-name"
"""What the canned children call their Model."""
UID = "model-uid"
_AT_ONCE = 16


class Bare:
    """`children`: JSON text of a list of manifests, in the order in which they are applied."""

    def __init__(self, kubeconfig: str, children: str) -> None:
        self._access = find_access(kubeconfig)
        self._children = children
        self._seen: dict[str, dict[str, Object]] = {}
        self._done: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    async def run(self, ready: Callable[[], None]) -> None:
        kinds = watched_kinds(pod_monitors=False)
        registry = kopf.OperatorRegistry()

        async def login(**_: Any) -> kopf.AiohttpSession:
            return kopf.AiohttpSession(server=self._access.server, aiohttp_session=self._new_session())

        kopf.on.login(registry=registry)(login)
        for watched in kinds:
            self._follow(registry, watched.resource.api_version, watched.resource.plural, watched.kind)
        ready()
        async with self._new_session() as self._session:
            await kopf.operator(
                registry=registry,
                settings=watch_settings(kinds),
                standalone=True,
                clusterwide=True,
                identity="bare",  # type: ignore[arg-type]
            )

    def _follow(self, registry: kopf.OperatorRegistry, api_version: str, plural: str, kind: str) -> None:
        seen = self._seen.setdefault(kind, {})

        async def happened(type: str | None, body: Mapping[str, Any], **_: Any) -> None:
            thing = dict(body)
            uid = thing["metadata"]["uid"]
            if type == "DELETED":
                seen.pop(uid, None)
                return
            seen[uid] = thing
            if kind == MODELS.kind and uid not in self._done and not thing.get("status"):
                self._done.add(uid)
                task = asyncio.create_task(self._make(thing))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        group, _, version = api_version.rpartition("/")
        kopf.on.event(group, version, plural, id=f"happened-{plural}", registry=registry)(happened)

    async def _make(self, model: Object) -> None:
        about = model["metadata"]
        written = self._children.replace(NAME, about["name"]).replace(UID, about["uid"])
        for manifest in json.loads(written):
            resource = resource_of(manifest["apiVersion"], manifest["kind"])
            path = resource.path(about["namespace"], manifest["metadata"]["name"])
            manifest["metadata"]["namespace"] = about["namespace"]
            await self._send(path, manifest, "application/apply-patch+yaml", {"fieldManager": "bare", "force": "true"})
        ready = {"type": "Ready", "status": "True", "reason": "Serving", "message": "All that was asked for is there."}
        told = {"status": {"observedGeneration": about["generation"], "conditions": [ready | _TIMES]}}
        path = f"{MODELS.path(about['namespace'], about['name'])}/status"
        await self._send(path, told, "application/merge-patch+json", {})

    async def _send(self, path: str, body: Object, content_type: str, query: dict[str, str]) -> None:
        assert self._session is not None
        async with (
            self._slots,
            self._session.patch(
                self._access.server + path, data=json.dumps(body), params=query, headers={"Content-Type": content_type}
            ) as answer,
        ):
            told = await answer.json()
            if answer.status >= 300:
                raise RuntimeError(f"{path}: {answer.status} {told.get('message')}")

    def _new_session(self) -> aiohttp.ClientSession:
        assert self._access.token is not None
        headers = {"Authorization": f"Bearer {self._access.token.value()}"}
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)


_TIMES = {"lastTransitionTime": "2000-01-01T00:00:00Z"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    parser.add_argument("--children", type=Path, required=True)
    options, _ = parser.parse_known_args(sys.argv[1:])

    def ready() -> None:
        options.ready_file.write_text(json.dumps({"status_address": "", "pid": os.getpid()}))

    asyncio.run(Bare(options.kubeconfig, options.children.read_text()).run(ready))


if __name__ == "__main__":
    main()
