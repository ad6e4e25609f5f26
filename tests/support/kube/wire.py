"""Bare HTTP to an API server, by a kubeconfig: for tests that look at answers as they come over the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
from antiphon_operator.kube.kubeconfig import find_access
from yarl import URL

TYPES = {
    "": "application/json",
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
}
DEADLINE_S = 60


@dataclass(frozen=True)
class Answer:
    code: int
    body: Any


class Wire:
    """`async with Wire(kubeconfig) as wire: answer = await wire.ask("GET", "/version")`."""

    def __init__(self, kubeconfig: Path) -> None:
        self._access = find_access(str(kubeconfig), {})

    async def __aenter__(self) -> Self:
        token = self._access.token.value() if self._access.token else ""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connector = aiohttp.TCPConnector(limit=0, ssl=self._access.tls or True)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(
        self, method: str, path: str, body: Any = None, *, kind: str = "", headers: dict[str, str] | None = None
    ) -> Answer:
        """`kind` names the type of a patch; the path may have a query."""
        async with (
            asyncio.timeout(DEADLINE_S),
            self._session.request(
                method,
                self._url(path),
                data=None if body is None else json.dumps(body),
                headers={"Content-Type": TYPES[kind]} | (headers or {}),
            ) as answer,
        ):
            text = await answer.text()
            is_json = answer.content_type == "application/json"
            return Answer(answer.status, json.loads(text) if is_json and text else text)

    @asynccontextmanager
    async def watch(self, path: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The events of a watch, parsed. The iterator ends when the server ends the watch."""
        separator = "&" if "?" in path else "?"
        async with self._session.get(self._url(f"{path}{separator}watch=true")) as answer:
            assert answer.status == 200, await answer.text()

            async def events() -> AsyncIterator[dict[str, Any]]:
                async for line in answer.content:
                    yield json.loads(line)

            yield events()

    def _url(self, path: str) -> URL:
        return URL(self._access.server.rstrip("/") + path, encoded=True)


async def next_event(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    """Raises StopAsyncIteration at the end of the watch, TimeoutError where nothing comes."""
    async with asyncio.timeout(DEADLINE_S):
        return await anext(events)
