"""One connection to Redis on which every command has a deadline.

Owned by one task for one session: whatever fails (a reset, a timeout, an error reply) ends the session, its owner
backs off and opens a new one. So no connection is ever used after a command on it was given up.
A deadline measures Redis and not this process: time in which the event loop came to nothing does not count, as the
answer may lie in the socket unread. Otherwise a busy process gives up every answer, and is busier for it.
Credentials (`access`) are never logged or put into errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from antiphon_kvtransfer.access import RedisAccess

COMMAND_DEADLINE_S = 1.0
_WAIT_PER_WORKER_S = 0.002
_MOST_PATIENCE = 4.0
_DEADLINE_TICKS = 4
"""A deadline has passed when so many timers have fired one after the other, each set when the last one fired."""

SESSION_ERRORS = (RedisError, OSError, TimeoutError)
"""What ends a session and is answered by a new one."""


def fleet_deadline_s(workers: int) -> float:
    """For a command where a model has so many workers: each of them may write its set first, 1 to 2 ms of Redis."""
    return COMMAND_DEADLINE_S + workers * _WAIT_PER_WORKER_S


class PartsLost(RedisError):
    """What was written a moment ago is not there any more."""


def problem(error: Exception) -> str:
    """What to say of an error that ended a session: without credentials, and with what to do where that is known."""
    if isinstance(error, AuthenticationError):
        return (
            "redis refuses the user name or the password: check --redis-username and --redis-password-file, which is "
            "read again for each try"
        )
    if isinstance(error, NoPermissionError):
        return f"the redis user may not do what is needed: check its access rules ({error})"
    return f"redis not usable ({type(error).__name__}: {error})"


def is_refusal(error: Exception) -> bool:
    """Redis is there, and does not let us in."""
    return isinstance(error, AuthenticationError | NoPermissionError)


class Outage:
    """What is said of one outage: that it began, and once more if it turns out that Redis does not let us in."""

    def __init__(self) -> None:
        self._said: set[bool] = set()

    def is_news(self, error: Exception) -> bool:
        refusal = is_refusal(error)
        if refusal in self._said:
            return False
        self._said.add(refusal)
        return True

    def over(self) -> None:
        self._said.clear()


class RedisSession:
    """One connection. Commands one after the other, each under its deadline times the owner's patience."""

    def __init__(self, access: RedisAccess, password: str, backoff: Backoff) -> None:
        self._backoff = backoff
        credentials = (("username", access.username), ("password", password))
        given: dict[str, Any] = {name: value for name, value in credentials if value}
        # RESP2: replies have one shape on every server; no retries inside: sessions are what is retried.
        self._client: Redis = Redis.from_url(
            access.url,
            **given,
            protocol=2,
            max_connections=1,
            # Connecting is part of the first command, and under its deadline.
            socket_connect_timeout=None,
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
        )

    async def script(
        self, text: str, keys: Sequence[str], arguments: Sequence[str | bytes | int], deadline_s: float
    ) -> Any:
        async with _deadline(deadline_s * self._backoff.patience):
            return await self._client.eval(text, len(keys), *keys, *cast(Sequence[str], arguments))

    async def read_stream(
        self, key: str, after: bytes, *, count: int, block_ms: int | None, deadline_s: float
    ) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
        """Entries after id `after`, oldest first; waits up to `block_ms` for one, which `deadline_s` leaves out."""
        async with _deadline(deadline_s * self._backoff.patience + (block_ms or 0) / 1000):
            reply = await cast(Awaitable[Any], self._client.xread({key: after}, count=count, block=block_ms))
        return reply[0][1] if reply else []

    async def close(self) -> None:
        with contextlib.suppress(*SESSION_ERRORS):
            async with asyncio.timeout(COMMAND_DEADLINE_S):
                await self._client.aclose()


@contextlib.asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError. Between two ticks the loop has read what had come, however late it was."""
    loop = asyncio.get_running_loop()
    ticks_left = _DEADLINE_TICKS
    timer: asyncio.TimerHandle

    def tick() -> None:
        nonlocal ticks_left, timer
        ticks_left -= 1
        if ticks_left:
            timer = loop.call_later(seconds / _DEADLINE_TICKS, tick)
        else:
            scope.reschedule(loop.time())

    timer = loop.call_later(seconds / _DEADLINE_TICKS, tick)
    try:
        async with asyncio.timeout(None) as scope:
            yield
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {seconds:.1f} s") from error
    finally:
        timer.cancel()


@contextlib.asynccontextmanager
async def session(access: RedisAccess, backoff: Backoff) -> AsyncIterator[RedisSession]:
    """A connection, opened when it is first used. Raises OSError where the password cannot be read."""
    password = await asyncio.to_thread(access.password) if access.password_file else ""
    opened = RedisSession(access, password, backoff)
    try:
        yield opened
    except TimeoutError:
        backoff.timed_out()
        raise
    finally:
        await opened.close()


class Backoff:
    """What one owner of sessions learns from those that failed.

    Waits between them: doubling from 50 ms, at most about 1 s, with jitter so that a fleet does not march.
    And patience: a Redis that is slow for want of a processor gets up to four times as long for an answer, as giving up
    and asking again would make it slower still. With each success it goes back by half.
    """

    def __init__(self, first_s: float = 0.05, longest_s: float = 1.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._failures = 0
        self.patience = 1.0

    def succeeded(self) -> None:
        self._failures = 0
        self.patience = max(1.0, self.patience / 2)

    def timed_out(self) -> None:
        self.patience = min(_MOST_PATIENCE, self.patience * 2)

    def next_s(self) -> float:
        ceiling_s = min(self._longest_s, self._first_s * float(1 << min(self._failures, 10)))
        self._failures += 1
        return ceiling_s * random.uniform(0.5, 1.0)
