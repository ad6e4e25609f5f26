"""The autoscaler's shelf in Redis: news of gateways are read there, its memory and its decisions are kept there.

One connection of its own, so that reading many news never waits behind records of Models. Every exchange has a
deadline. What fails raises StoreError: the autoscaler goes on with what it has, which the law takes for old news.
Nothing is written once the Lease is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from antiphon_kvtransfer import RedisAccess
from antiphon_kvtransfer.keys import ModelKeys
from antiphon_kvtransfer.scaling_decisions import DECISION_FIELD, KEPT_FOR_S
from antiphon_policy.scaling import GatewayNews, ScalingDecision, ScalingNewsError, decode_news
from antiphon_policy.scaling.remembered import (
    Remembered,
    RememberedError,
    decode_remembered,
    encode_decision,
    encode_remembered,
    most_decisions,
)
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

log = logging.getLogger("antiphon.operator.autoscaler")

DEADLINE_S = 2.0
_ERRORS = (RedisError, OSError, TimeoutError)


class StoreError(Exception):
    """Redis did not answer, or not as it should. The message says what was asked of it."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """What stands there of one Model."""

    news: tuple[GatewayNews, ...]
    remembered: Remembered | None
    """None: it was not asked for, there is none, or none of this version."""


class ScalingStore:
    """See the module's docstring. Belongs to one event loop; `close` ends its connection."""

    def __init__(self, access: RedisAccess, *, may_write: Callable[[], bool] = lambda: True) -> None:
        """Raises RedisUrlError."""
        access.check()
        self._access = access
        self._may_write = may_write
        self._redis: Redis | None = None
        self._unreadable: set[str] = set()

    async def read(self, model_key: str, *, with_memory: bool) -> Shelf:
        """Raises StoreError. News that cannot be read are left out, and said once."""
        keys = ModelKeys(model_key)
        pipeline = (await self._connected()).pipeline(transaction=False)
        pipeline.hgetall(keys.news)
        if with_memory:
            pipeline.get(keys.scaling)
        answers = await self._execute(pipeline, f"the news of {model_key}")
        told = cast(Mapping[bytes, bytes], answers[0])
        return Shelf(
            news=tuple(news for name, raw in told.items() if (news := self._read(model_key, name, raw)) is not None),
            remembered=self._memory(model_key, answers[1]) if with_memory else None,
        )

    async def keep(self, model_key: str, remembered: Remembered, decision: ScalingDecision | None) -> None:
        """The memory, and a decision for people to see. Raises StoreError."""
        if not self._may_write():
            raise StoreError(f"the memory of {model_key} was not written: the Lease is not held any more")
        keys, kept_ms = ModelKeys(model_key), int(KEPT_FOR_S * 1000)
        pipeline = (await self._connected()).pipeline(transaction=False)
        pipeline.set(keys.scaling, encode_remembered(remembered), px=kept_ms)
        if decision is not None:
            raw = encode_decision(decision)
            pipeline.xadd(keys.decisions, {DECISION_FIELD: raw}, maxlen=most_decisions(len(raw)), approximate=False)
            pipeline.pexpire(keys.decisions, kept_ms)
        await self._execute(pipeline, f"the memory of {model_key}")

    async def close(self) -> None:
        redis, self._redis = self._redis, None
        if redis is not None:
            with contextlib.suppress(*_ERRORS):
                async with asyncio.timeout(DEADLINE_S):
                    await redis.aclose()

    def _read(self, model_key: str, name: bytes, raw: bytes) -> GatewayNews | None:
        gateway = name.decode(errors="replace")
        try:
            return decode_news(raw, gateway)
        except ScalingNewsError as error:
            if gateway not in self._unreadable:
                self._unreadable.add(gateway)
                log.warning("%s: %s", model_key, error)
            return None

    def _memory(self, model_key: str, raw: object) -> Remembered | None:
        if not isinstance(raw, bytes):
            return None
        try:
            return decode_remembered(raw)
        except RememberedError as error:
            log.warning("%s: %s", model_key, error)
            return None

    async def _execute(self, pipeline: Any, what: str) -> list[Any]:
        try:
            async with asyncio.timeout(DEADLINE_S):
                answers: list[Any] = await pipeline.execute()
                return answers
        except _ERRORS as error:
            await self.close()
            raise StoreError(f"Redis at {self._access}: {what}: {type(error).__name__}: {error}") from error

    async def _connected(self) -> Redis:
        """The client connects with the first exchange. After a failure there is a new one, with the password that the
        file has then."""
        if self._redis is None:
            try:
                password = await asyncio.to_thread(self._access.password)
            except OSError as error:
                raise StoreError(f"the Redis password cannot be read: {error}") from error
            self._redis = Redis.from_url(
                self._access.url,
                protocol=2,
                max_connections=1,
                socket_connect_timeout=DEADLINE_S,
                retry=Retry(NoBackoff(), 0),
                health_check_interval=0,
                username=self._access.username or None,
                password=password or None,
            )
        return self._redis
