"""The operator's voice in Redis: a record of each Model for the gateways, and a user for each Model's workers.

One task writes. What should stand in Redis is a value here (`put`, `remove`, `put_access`, `remove_access` only change
it and return at once), and is written when it changes, again every quarter of its time to live, and whole at the start
of every connection. So Redis may be emptied, restarted or replaced at any time: what belongs there is back as soon as
it answers, and at the latest with the next renewal.

A record outlives its renewals by an hour: a gateway that starts while no operator runs still knows the Models. What an
operator before this one left there for a Model that is gone is marked as such when all Models are known.

Failures of Redis never leave `run`: they are logged once per outage and tried again with a back-off of at most about
two seconds. A server that does not let the operator keep users still gets the records, as gateways need those.
Nothing is taken back when the operator ends: the next one goes on, or the records run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
from antiphon_kvtransfer import check_url
from antiphon_kvtransfer.keys import MODELS_KEY, ModelKeys
from antiphon_kvtransfer.model_record import ModelRecord, ModelRecordError, decode_model_record, encode_model_record
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError

from antiphon_operator.runtime.redis_access import UserAccess
from antiphon_operator.runtime.redis_users import RedisUsers, batches, unix_ms

__all__ = ["RecordWriter", "UserAccess"]

_log = logging.getLogger("antiphon.operator.redis")

TTL_S = 60.0
"""Renewed every quarter of it. For so long gateways are told that a Model is gone, and its user is kept."""
OUTLIVE_S = 3600.0
"""How long a record stays when nobody renews it."""
CONNECT_DEADLINE_S = 2.0
BATCH_DEADLINE_S = 5.0
CHECK_S = 1.0
_LONGEST_BACKOFF_S = 2.0
_SESSION_ERRORS = (RedisError, OSError, TimeoutError)

_LIST_MODELS = """
-- KEYS models; ARGV ttl_ms shorten model... Keeps models in the list of models, as their workers would, and takes those
-- off that nobody keeps there any more. `shorten`: these are about to go, so what they had there longer is taken back.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local expiry = now + tonumber(ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%d', now))
for number = 3, #ARGV do
  if ARGV[2] == '1' or tonumber(redis.call('ZSCORE', KEYS[1], ARGV[number]) or '0') < expiry then
    redis.call('ZADD', KEYS[1], string.format('%d', expiry), ARGV[number])
  end
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[1]) then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return 1
"""


class RecordWriter:
    """See the module's docstring. All methods belong to one event loop."""

    def __init__(
        self,
        url: str,
        username: str = "",
        password_file: str = "",
        *,
        ttl_s: float = TTL_S,
        outlive_s: float = OUTLIVE_S,
        may_write: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = unix_ms,
    ) -> None:
        """`password_file` is read at each connection. `may_write` is asked before each batch. Raises RedisUrlError."""
        check_url(url)
        self._url = url
        self._username = username
        self._password_file = password_file
        self._ttl_s = ttl_s
        self._outlive_s = outlive_s
        self._may_write = may_write
        self._clock = clock
        self._records: dict[str, ModelRecord] = {}
        self._users = RedisUsers(grace_s=ttl_s, clock=clock, now_ms=now_ms)
        self._changed_records: set[str] = set()
        self._is_orphan: Callable[[str], bool] | None = None
        self._look_for_orphans = False
        self._wake = asyncio.Event()
        self._run_id = ""
        self._trouble = ""
        self.healthy = False
        """Redis answered, and what should stand there does."""

    # -- what should stand in Redis

    def put(self, record: ModelRecord) -> None:
        if self._records.get(record.model) != record:
            self._records[record.model] = record
            self._changed_records.add(record.model)
            self._wake.set()

    def remove(self, model_key: str) -> None:
        """The Model is gone: gateways are told once, by a record that runs out like any other."""
        record = self._records.get(model_key)
        if record is not None:
            self.put(msgspec.structs.replace(record, deleted=True))

    def put_access(self, access: UserAccess) -> None:
        if self._users.put(access):
            self._wake.set()

    def remove_access(self, user: str) -> None:
        """The user goes after one time to live, so that workers that are ending can still say goodbye."""
        self._users.remove(user)

    def retain_access(self, is_orphan: Callable[[str], bool]) -> None:
        """All Models are known: users that an operator before this one left there for a Model that is an orphan (told
        by its key) go too, after the same time."""
        self._users.retain(is_orphan)
        self._wake.set()

    def retain_records(self, is_orphan: Callable[[str], bool]) -> None:
        """All Models are known: records that an operator before this one left there for an orphan say so, and go."""
        self._is_orphan = is_orphan
        self._look_for_orphans = True
        self._wake.set()

    # -- writing it

    async def run(self) -> None:
        """Write until cancelled. Survives whatever Redis does."""
        failures = 0
        while True:
            self._write_all()
            redis = None
            try:
                redis = self._connect()
                async for _ in self._rounds(redis):
                    failures = 0
            except _SESSION_ERRORS as error:
                self._in_trouble(f"{type(error).__name__}: {error}")
            finally:
                self.healthy = False
                if redis is not None:
                    await _close(redis)
            failures += 1
            ceiling_s = min(_LONGEST_BACKOFF_S, 0.05 * 2.0 ** min(failures, 10))
            await asyncio.sleep(ceiling_s * random.uniform(0.5, 1.0))

    async def _rounds(self, redis: Redis) -> AsyncIterator[None]:
        """Write what changed, when it changed, and everything when it is due. Yields after each round.

        Between writes the server is asked every second which one it is: a restarted one has lost the users, and workers
        that come back to it need them at once.
        """
        renew_at = self._clock() + self._ttl_s / 4
        await self._look(redis)
        while True:
            self._wake.clear()
            await self._find_out_a_restart(redis)
            await self._find_orphans(redis)
            await self._write_records(redis)
            await self._users.write(redis, self._execute_all)
            self._in_order()
            yield
            due_at = min((renew_at, self._clock() + CHECK_S, self._users.due_at()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due_at - self._clock())):
                    await self._wake.wait()
            if self._clock() >= renew_at:
                renew_at = self._clock() + self._ttl_s / 4
                self._write_all()

    async def _find_out_a_restart(self, redis: Redis) -> None:
        """By the server's run id. The client library connects anew by itself, so a broken connection does not tell."""
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                server: Mapping[str, Any] = await redis.info("server")
        except NoPermissionError:
            return  # Then the next renewal brings everything back.
        run_id = str(server.get("run_id", ""))
        if run_id != self._run_id:
            if self._run_id:
                await self._look(redis)
            self._run_id = run_id
            self._write_all()

    async def _find_orphans(self, redis: Redis) -> None:
        if not self._look_for_orphans or self._is_orphan is None:
            return
        try:
            async with asyncio.timeout(BATCH_DEADLINE_S):
                members = cast(list[bytes], await redis.zrange(MODELS_KEY, 0, -1))
                listed = [key.decode() for key in members]
                for key in (key for key in listed if key not in self._records and self._is_orphan(key)):
                    raw = cast(bytes | None, await redis.get(ModelKeys(key).model_record))
                    with contextlib.suppress(ModelRecordError):  # Then it is not for us to judge, and runs out.
                        if raw is not None and not (record := decode_model_record(raw, key)).deleted:
                            self.put(msgspec.structs.replace(record, deleted=True))
        except NoPermissionError as refusal:
            _log.warning(
                "records of Models that are gone cannot be looked for, they run out by themselves: %s", refusal
            )
        self._look_for_orphans = False

    async def _look(self, redis: Redis) -> None:
        """Whatever another operator, or this one before an outage, has left there."""
        async with asyncio.timeout(BATCH_DEADLINE_S):
            await self._users.look(redis)

    def _write_all(self) -> None:
        self._changed_records |= self._records.keys()
        self._users.renew()

    async def _write_records(self, redis: Redis) -> None:
        for keys in batches(self._changed_records):
            records = [self._records[key] for key in keys]
            pipeline = redis.pipeline(transaction=False)
            for gone, stays_ms in ((False, int(self._outlive_s * 1000)), (True, int(self._ttl_s * 1000))):
                chosen = [record for record in records if record.deleted == gone]
                for record in chosen:
                    pipeline.set(ModelKeys(record.model).model_record, encode_model_record(record), px=stays_ms)
                if chosen:
                    listed = [record.model for record in chosen]
                    pipeline.eval(_LIST_MODELS, 1, MODELS_KEY, str(stays_ms), str(int(gone)), *listed)
            await self._execute(pipeline)
            for record in records:
                # One that was put meanwhile stays to be written.
                if self._records.get(record.model) == record:
                    self._changed_records.discard(record.model)
                    if record.deleted:
                        del self._records[record.model]

    async def _execute(self, pipeline: Any, *, raise_on_error: bool = True) -> list[Any]:
        if not self._may_write():
            raise ConnectionAbortedError("the Lease is not held any more")
        try:
            async with asyncio.timeout(BATCH_DEADLINE_S):
                answers: list[Any] = await pipeline.execute(raise_on_error=raise_on_error)
                return answers
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {BATCH_DEADLINE_S:g} s") from error

    async def _execute_all(self, pipeline: Any) -> list[Any]:
        return await self._execute(pipeline, raise_on_error=False)

    # -- the connection

    def _connect(self) -> Redis:
        password = Path(self._password_file).read_text(encoding="utf-8").strip() if self._password_file else None
        # RESP2: replies have one shape on every server; no retries inside: connections are what is retried.
        redis: Redis = Redis.from_url(
            self._url,
            protocol=2,
            max_connections=1,
            socket_connect_timeout=CONNECT_DEADLINE_S,
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
            username=self._username or None,
            password=password,
        )
        return redis

    # -- said once per outage

    def _in_trouble(self, what: str) -> None:
        if not self._trouble:
            _log.warning("redis at %s cannot be written, gateways keep what they know: %s", _place(self._url), what)
        self._trouble = what

    def _in_order(self) -> None:
        if not self.healthy:
            _log.info("records and users of Models stand in redis at %s", _place(self._url))
        self._trouble = ""
        self.healthy = True


def _place(url: str) -> str:
    """Host and port, or path: never a password."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port}" if parts.hostname else parts.path


async def _close(redis: Redis) -> None:
    with contextlib.suppress(*_SESSION_ERRORS):
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            await redis.aclose()
