"""One client's watch: what changed since a version, as a stream of lines, with bookmarks.

A watcher gets references to the store's changes and does its own sifting; what it sends was serialised once for all.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from tests.support.kube.api import Api
from tests.support.kube.errors import ApiError
from tests.support.kube.objects import Object
from tests.support.kube.resources import Resource
from tests.support.kube.selectors import Test
from tests.support.kube.store import Change

BOOKMARK_EVERY_S = 5.0
_LONGEST_S = (1800, 3600)
"""A watch that names no timeout lives for a time between these."""
Shape = Callable[[Object], Object]


@dataclass(frozen=True)
class WatchOptions:
    since: str
    """A resourceVersion; empty or `0`: what is there now comes first, as ADDED."""
    initial_events: bool
    """As `since=""`, with a bookmark that says when all of it has been sent."""
    bookmarks: bool
    timeout_s: float | None


class Watch:
    """`shape` turns objects into what this client accepts (tables); None sends them as they are."""

    def __init__(
        self,
        api: Api,
        resource: Resource,
        namespace: str | None,
        test: Test | None,
        options: WatchOptions,
        shape: Shape | None = None,
    ) -> None:
        self._api, self._resource, self._namespace = api, resource, namespace
        self._test, self._options, self._shape = test, options, shape
        self._pending: deque[Change] = deque()
        self._wake = asyncio.Event()
        self._ended = False

    def end(self) -> None:
        """From outside: the server closes, or a test drops its watches."""
        self._ended = True
        self._wake.set()

    async def run(self, response: web.StreamResponse) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = self._options.timeout_s
        deadline = loop.time() + (random.uniform(*_LONGEST_S) if timeout_s is None else timeout_s)
        lines = self._first()
        unsubscribe = self._api.store.subscribe(self._see)
        try:
            while True:
                if lines:
                    await response.write(b"".join(lines))
                if self._ended:
                    return
                try:
                    async with asyncio.timeout(max(min(deadline - loop.time(), BOOKMARK_EVERY_S), 0)):
                        await self._wake.wait()
                except TimeoutError:
                    is_last = loop.time() >= deadline
                    if self._options.bookmarks and not self._pending:
                        await response.write(self._bookmark(self._api.store.version))
                    if is_last:
                        return
                lines = self._drained()
        finally:
            unsubscribe()

    def _first(self) -> list[bytes]:
        """What to send at once."""
        store, options = self._api.store, self._options
        if options.initial_events or options.since in ("", "0"):
            lines = [
                self._line("ADDED", value)
                for value in store.all(self._resource, self._namespace)
                if self._test is None or self._test(value)
            ]
            if options.initial_events:
                lines.append(self._bookmark(store.version, annotations={"k8s.io/initial-events-end": "true"}))
            return lines
        try:
            missed = store.since(self._resource, int(options.since))
        except ApiError as error:
            self._ended = True
            return [self._event("ERROR", msgspec.json.encode(error.body()))]
        return [
            line
            for change in missed
            if self._namespace in (None, change.value["metadata"].get("namespace"))
            for line in self._of(change)
        ]

    def _see(self, change: Change) -> None:
        if change.resource == self._resource and self._namespace in (None, change.value["metadata"].get("namespace")):
            self._pending.append(change)
            self._wake.set()

    def _drained(self) -> list[bytes]:
        lines: list[bytes] = []
        while self._pending:
            lines += self._of(self._pending.popleft())
        if not self._ended:
            self._wake.clear()
        return lines

    def _of(self, change: Change) -> list[bytes]:
        """The line of a change; none if it does not concern this client."""
        kind: str = change.type
        if self._test is not None:
            was = change.before is not None and self._test(change.before)
            now = change.type != "DELETED" and self._test(change.value)
            if not was and not now:
                return []
            kind = "DELETED" if not now else "MODIFIED" if was else "ADDED"
        if self._shape is not None:
            return [self._line(kind, change.value)]
        return [self._event(kind, change.encoded)]

    def _line(self, kind: str, value: Object) -> bytes:
        return self._event(kind, msgspec.json.encode(self._shape(value) if self._shape else value))

    @staticmethod
    def _event(kind: str, encoded: bytes) -> bytes:
        return b'{"type":"' + kind.encode() + b'","object":' + encoded + b"}\n"

    def _bookmark(self, version: int, annotations: dict[str, str] | None = None) -> bytes:
        metadata: Object = {"resourceVersion": str(version), "creationTimestamp": None}
        if annotations:
            metadata["annotations"] = annotations
        value = {"kind": self._resource.kind, "apiVersion": self._resource.api_version, "metadata": metadata}
        return self._event("BOOKMARK", msgspec.json.encode(value))
