"""One connection to Redis on which every command has a deadline.

Owned by one task for one session: whatever fails (a reset, a timeout, an error reply) ends the session, its owner
backs off and opens a new one. So no connection is ever used after a command on it was given up.
The URL may carry a password: only `redacted` forms are logged or put into errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

COMMAND_DEADLINE_S = 1.0
BULK_DEADLINE_S = 5.0
"""For commands that carry a whole set of block hashes."""

SESSION_ERRORS = (RedisError, OSError, TimeoutError)
"""What ends a session and is answered by a new one."""


class RedisUrlError(Exception):
    """The Redis URL cannot be used. The message says why, without credentials, and what to do."""


def redacted(url: str) -> str:
    """The URL without user, password and query."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"
    except ValueError:
        return "(an unreadable URL)"


def check_url(url: str) -> None:
    """Raises RedisUrlError unless the URL is one of redis://, rediss://, unix://."""
    try:
        scheme = urlsplit(url).scheme
        if scheme in ("redis", "rediss", "unix"):
            Redis.from_url(url)
            return
    except (ValueError, TypeError):
        # Not kept as the cause: its own text may quote the URL.
        raise RedisUrlError(
            f"the Redis URL {redacted(url)} is not valid: it must look like redis://[user:password@]host:port/database"
        ) from None
    raise RedisUrlError(
        f"the Redis URL {redacted(url)} has no scheme that is known: use redis://, rediss:// (TLS) or unix://"
    )


class RedisSession:
    """One connection. Commands one after the other."""

    def __init__(self, url: str) -> None:
        # RESP2: replies have one shape on every server; no retries inside: sessions are what is retried.
        self._client: Redis = Redis.from_url(
            url,
            protocol=2,
            max_connections=1,
            socket_connect_timeout=COMMAND_DEADLINE_S,
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
        )

    async def script(
        self, text: str, keys: Sequence[str], arguments: Sequence[str | bytes | int], deadline_s: float
    ) -> Any:
        async with _deadline(deadline_s):
            return await self._client.eval(text, len(keys), *keys, *cast(Sequence[str], arguments))

    async def read_stream(
        self, key: str, after: bytes, *, count: int, block_ms: int | None
    ) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
        """Entries after id `after`, oldest first; waits up to `block_ms` for one."""
        async with _deadline(COMMAND_DEADLINE_S + (block_ms or 0) / 1000):
            reply = await cast(Awaitable[Any], self._client.xread({key: after}, count=count, block=block_ms))
        return reply[0][1] if reply else []

    async def close(self) -> None:
        with contextlib.suppress(*SESSION_ERRORS):
            async with asyncio.timeout(COMMAND_DEADLINE_S):
                await self._client.aclose()


@contextlib.asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {seconds:.1f} s") from error


@contextlib.asynccontextmanager
async def session(url: str) -> AsyncIterator[RedisSession]:
    opened = RedisSession(url)
    try:
        yield opened
    finally:
        await opened.close()


class Backoff:
    """Waits between sessions: doubling from 50 ms, at most about 1 s, with jitter so that a fleet does not march."""

    def __init__(self, first_s: float = 0.05, longest_s: float = 1.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._failures = 0

    def succeeded(self) -> None:
        self._failures = 0

    def next_s(self) -> float:
        ceiling_s = min(self._longest_s, self._first_s * float(1 << min(self._failures, 10)))
        self._failures += 1
        return ceiling_s * random.uniform(0.5, 1.0)
