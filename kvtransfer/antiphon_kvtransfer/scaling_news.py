"""What gateways tell for scaling, where it lies in Redis: one hash a model, one field a gateway.

    antiphon:{MODEL}:news     gateway id -> JSON with `at_ms`, when it was told (`antiphon_policy.scaling.news`)

A gateway overwrites its field every second or two and removes it when it ends. One that was killed leaves its field:
whoever writes next removes what was told more than `FORGOTTEN_MS` ago. With the last gateway the whole hash runs out.
To those in this module news are bytes; only `at_ms` is looked for in them.

Writing never raises and never waits long: with Redis away a gateway serves on, and its news are lost until it is back,
which readers see by their age.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import cast

from redis.asyncio import Redis

from antiphon_kvtransfer._redis import (
    COMMAND_DEADLINE_S,
    SESSION_ERRORS,
    Backoff,
    Outage,
    RedisSession,
    problem,
    session,
)
from antiphon_kvtransfer.access import RedisAccess, access_of
from antiphon_kvtransfer.keys import ModelKeys

_log = logging.getLogger("antiphon.membership")

NEWS_TTL_MS = 60_000
"""For how long one write is good."""

FORGOTTEN_MS = 60_000
"""A gateway that has told nothing for so long is gone."""

_LOOK_FOR_GONE_S = 20.0

_WRITE = """
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
if ARGV[4] == '' then return 0 end
local gone = 0
for _, gateway in ipairs(redis.call('HKEYS', KEYS[1])) do
  if gateway ~= ARGV[1] then
    local at = string.match(redis.call('HGET', KEYS[1], gateway), '"at_ms":([%d.]+)')
    if not at or tonumber(at) < tonumber(ARGV[4]) then
      gone = gone + redis.call('HDEL', KEYS[1], gateway)
    end
  end
end
return gone
"""
"""KEYS: the hash. ARGV: gateway, news, time to live, and before when news are forgotten (empty: not looked for)."""

_REMOVE = "return redis.call('HDEL', KEYS[1], ARGV[1])"


class NewsWriter:
    """One gateway's hand. Owned by one task: one command at a time, on one connection that is opened when needed."""

    def __init__(self, redis: str | RedisAccess, gateway_id: str) -> None:
        """Raises RedisUrlError."""
        self._redis = access_of(redis)
        self._redis.check()
        self._gateway_id = gateway_id
        self._backoff = Backoff()
        self._outage = Outage()
        self._session: RedisSession | None = None
        self._open = contextlib.AsyncExitStack()
        self._looked_at: dict[str, float] = {}
        """By model, when gateways that are gone were last looked for (the loop's clock)."""

    async def write(self, model: str, news: bytes, now_ms: float) -> bool:
        """Replace what this gateway told of the model before. False: Redis is away, which the log says once."""
        now_s = asyncio.get_running_loop().time()
        look = now_s - self._looked_at.get(model, float("-inf")) >= _LOOK_FOR_GONE_S
        before = str(int(now_ms - FORGOTTEN_MS)) if look else ""
        done = await self._run(_WRITE, model, (self._gateway_id, news, NEWS_TTL_MS, before))
        if done and look:
            self._looked_at[model] = now_s
        return done

    async def remove(self, model: str) -> bool:
        """This gateway tells nothing of the model any more."""
        self._looked_at.pop(model, None)
        return await self._run(_REMOVE, model, (self._gateway_id,))

    async def close(self) -> None:
        self._session = None
        await self._open.aclose()

    async def _run(self, script: str, model: str, arguments: tuple[str | bytes | int, ...]) -> bool:
        try:
            if self._session is None:
                self._session = await self._open.enter_async_context(session(self._redis, self._backoff))
            await self._session.script(script, (ModelKeys(model).news,), arguments, COMMAND_DEADLINE_S)
        except SESSION_ERRORS as error:
            if self._outage.is_news(error):
                _log.warning("news for scaling are not told: %s", problem(error))
            if isinstance(error, TimeoutError):
                self._backoff.timed_out()
            await self.close()
            return False
        self._backoff.succeeded()
        self._outage.over()
        return True


async def read_news(redis: Redis, model: str) -> dict[str, bytes]:
    """All gateways' news of a model, by gateway id. Raises what the client raises; the caller has the deadline."""
    found = await cast(Awaitable[dict[bytes, bytes]], redis.hgetall(ModelKeys(model).news))
    return {gateway_id.decode(): news for gateway_id, news in found.items()}
