"""JSON pages of workers and gateways: bounded in time, in size and in how many are read at once.

A page is asked on a connection of its own: workers' status servers answer one request a connection, and gateways
come and go behind their addresses.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import aiohttp
import msgspec

_T = TypeVar("_T")

DEADLINE_S = 3.0
AT_ONCE = 64
MAX_PAGE_BYTES = 8 * 1024 * 1024


class PageError(OSError):
    """A page that did not come, or is not what it should be. The message says whose and why."""


class Pages:
    """Reads pages on one event loop until closed."""

    def __init__(self, *, deadline_s: float = DEADLINE_S, at_once: int = AT_ONCE) -> None:
        self._deadline_s = deadline_s
        self._slots = asyncio.Semaphore(at_once)
        self._session: aiohttp.ClientSession | None = None

    async def read(
        self,
        url: str,
        page: type[_T],
        *,
        statuses: tuple[int, ...] = (200,),
        host: str = "",
    ) -> _T:
        """The page, as far as `page` (a msgspec struct) names its fields. Raises PageError.

        `host`: whose name the server should be asked by, and its certificate checked for, where the URL has an address.
        """
        async with self._slots:
            try:
                async with asyncio.timeout(self._deadline_s):
                    raw = await self._fetch(url, statuses, host)
            except TimeoutError:
                raise PageError(f"{url} did not answer within {self._deadline_s:g} s") from None
            except aiohttp.ClientError as error:
                raise PageError(f"{url} cannot be read: {error or type(error).__name__}") from error
        try:
            return msgspec.json.decode(raw, type=page)
        except msgspec.MsgspecError as error:
            raise PageError(f"{url} is not the page it should be ({error}): is it of another version?") from error

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _fetch(self, url: str, statuses: tuple[int, ...], host: str) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        headers = {"Host": host} if host else {}
        name = host if host and url.startswith("https:") else None
        async with self._session.get(url, headers=headers, allow_redirects=False, server_hostname=name) as response:
            if response.status not in statuses:
                raise PageError(f"{url} answers with status {response.status}")
            raw = await response.content.read(MAX_PAGE_BYTES + 1)
            while not response.content.at_eof() and len(raw) <= MAX_PAGE_BYTES:
                raw += await response.content.read(MAX_PAGE_BYTES + 1)
            if len(raw) > MAX_PAGE_BYTES:
                raise PageError(f"{url} is longer than {MAX_PAGE_BYTES} bytes")
            return raw
