"""What the gateways say of Models on their `/ready` pages: how many workers of each revision each has a stream with.

All addresses behind the host's name are asked, each time anew, as gateways come and go. One round of questions serves
all Models that ask at about the same time. A gateway that answers "not ready" (503) still says what it sees; one that
does not answer is named in `unreachable`, and it is for the planner to decide what that means.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

import msgspec

from antiphon_operator.plan.observed import GatewayView, GatewayViews
from antiphon_operator.runtime.pages import PageError, Pages
from antiphon_operator.runtime.workers import in_url

FRESH_S = 1.0
"""A round serves whoever asks within this time after it ended."""
RESOLVE_DEADLINE_S = 2.0
_NOT_READY = 503


class GatewayUrlError(ValueError):
    """The URL of the gateways cannot be used."""


class _Count(msgspec.Struct):
    prefill: int = 0
    decode: int = 0
    both: int = 0


class _Model(msgspec.Struct):
    revisions: dict[str, _Count] = {}


class _Ready(msgspec.Struct):
    """The fields of the page that count here."""

    models: dict[str, _Model] = {}


@dataclass(frozen=True, slots=True)
class _Round:
    """All gateways, asked once."""

    asked_at: datetime
    ended_at: float
    pages: Mapping[str, _Ready]
    """By address."""
    unreachable: tuple[str, ...]

    def of(self, model_key: str) -> GatewayViews:
        views = [_view(address, page.models.get(model_key)) for address, page in sorted(self.pages.items())]
        return GatewayViews(asked_at=self.asked_at, views=tuple(views), unreachable=self.unreachable)


def _view(address: str, model: _Model | None) -> GatewayView:
    """A model that the gateway does not know has no workers there. A worker that does both counts for both."""
    revisions = model.revisions if model is not None else {}
    return GatewayView(
        address=address,
        prefill={revision: count.prefill + count.both for revision, count in revisions.items()},
        decode={revision: count.decode + count.both for revision, count in revisions.items()},
    )


class Gateways:
    """See the module's docstring. Owns the task of the round under way; `close` ends it."""

    def __init__(self, url: str, *, pages: Pages | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`url`: http(s)://host[:port]. Raises GatewayUrlError."""
        try:
            parts = urlsplit(url)
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        except (ValueError, KeyError):
            raise GatewayUrlError(f"the gateways' URL {url!r} must look like http://host:port") from None
        if not parts.hostname:
            raise GatewayUrlError(f"the gateways' URL {url!r} names no host: it must look like http://host:port")
        self._scheme, self._host, self._port = parts.scheme, parts.hostname, port
        self._pages = pages or Pages()
        self._clock = clock
        self._last: _Round | None = None
        self._under_way: asyncio.Task[_Round] | None = None

    async def views(self, model_key: str) -> GatewayViews:
        """What every gateway says of one Model. Does not raise: what is wrong is said in `unreachable`."""
        last = self._last
        if last is None or self._clock() - last.ended_at >= FRESH_S:
            if self._under_way is None:
                self._under_way = asyncio.create_task(self._ask_all(), name="gateways")
            # The round is shared: whoever gives up waiting for it must not end it for the others.
            last = await asyncio.shield(self._under_way)
        return last.of(model_key)

    async def close(self) -> None:
        task = self._under_way
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._pages.close()

    async def _ask_all(self) -> _Round:
        asked_at = datetime.now(UTC)
        try:
            pages: dict[str, _Ready] = {}
            unreachable: list[str] = []
            try:
                addresses = await self._resolve()
            except (OSError, TimeoutError) as error:
                addresses = []
                unreachable.append(f"{self._host}: the name does not resolve ({error or 'no answer in time'})")
            answers = await asyncio.gather(*map(self._ask, addresses))
            for address, answer in zip(addresses, answers, strict=True):
                if isinstance(answer, PageError):
                    unreachable.append(str(answer))
                else:
                    pages[address] = answer
            self._last = _Round(asked_at, self._clock(), pages, tuple(unreachable))
            return self._last
        finally:
            self._under_way = None

    async def _resolve(self) -> list[str]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(RESOLVE_DEADLINE_S):
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        return sorted({str(entry[4][0]) for entry in found})

    async def _ask(self, address: str) -> _Ready | PageError:
        url = f"{self._scheme}://{in_url(address)}:{self._port}/ready"
        try:
            return await self._pages.read(url, _Ready, statuses=(200, _NOT_READY), host=self._host)
        except PageError as error:
            return error
