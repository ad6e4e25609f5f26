"""The worker's voice in Redis: its record, and the set of KV blocks that it holds.

One task writes; the engine only hands changes over (`block_change`: a lock, an append, never a wait). What is handed
over is bounded: when Redis is away for long, the changes are thrown away and the whole set is written anew later.

The one idea: *the engine's set is the truth, Redis holds a copy that can prove itself*. Each write names the
(incarnation, sequence) it continues, and is refused if Redis holds anything else (emptied, restored, written by
another incarnation). A refused writer takes a snapshot of the engine and writes that. So there is no fault of
Redis to be told apart from another: retry the same write, or republish.

Failures of Redis never leave `run`: they are logged once per outage and retried with a back-off of at most about a
second. Nothing here is on the way of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from antiphon_kvtransfer import _scripts
from antiphon_kvtransfer._events import pack_hashes
from antiphon_kvtransfer._redis import (
    COMMAND_DEADLINE_S,
    SESSION_ERRORS,
    Backoff,
    Outage,
    PartsLost,
    RedisSession,
    fleet_deadline_s,
    problem,
    session,
)
from antiphon_kvtransfer._scripts import WriteStatus
from antiphon_kvtransfer.access import RedisAccess, access_of
from antiphon_kvtransfer.identity import HASH_BYTES, BlockHash
from antiphon_kvtransfer.keys import MODELS_KEY, ModelKeys
from antiphon_kvtransfer.records import WorkerRecord, encode_record

_log = logging.getLogger("antiphon.membership")

INDEX_TTL_FACTOR = 4
"""The set of blocks outlives the record by this factor: a short outage does not make a fleet republish."""
EVENTS_KEPT = 20_000
"""About so many events stay in a model's stream; a reader further behind loads the sets anew."""
DELTA_HASHES = 256
"""A delta stops taking further changes at so many hashes, which bounds the stream's memory."""
FLEET_ROUNDS_PER_S = 5_000
"""All workers of a model together write so many rounds at most, as Redis and each gateway pay by the round. So in a
large fleet each takes more changes into one: of 1,000 workers a busy one writes five times a second."""
FLEET_SETS_PER_S = 500
"""All workers of a model together write so many whole sets on average: a Redis that restarts empty, or a fleet that
starts, has all of them write theirs. Written at once, each would wait for all others, and give up before its turn."""
PART_HASHES = 2_000
"""A whole set is written in parts of so many: Redis serves nobody else for the millisecond or two that one takes."""
PART_TTL_MS = 10_000
"""A part that nobody put in place is gone after that."""
MAX_PENDING_HASHES = 100_000
"""Changes not yet written that are kept; with more, the whole set is written instead."""

_SUPERSEDED = "a later started incarnation owns this worker id: give every worker its own id, or stop this process"


@dataclass(frozen=True, slots=True)
class _Change:
    sequence: int
    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class _Delta:
    """Consecutive changes folded into one: the last word on each hash counts."""

    previous: int
    sequence: int
    stored: bytes
    removed: bytes


class _Pending:
    """Changes handed over by the engine and not yet written. Thread-safe, bounded, never blocks for long."""

    def __init__(self, max_hashes: int) -> None:
        self._max_hashes = max_hashes
        self._lock = threading.Lock()
        self._changes: deque[_Change] = deque()
        self._hashes = 0
        self.lost = False
        """Changes were dropped since `forgive`."""

    def add(self, change: _Change) -> None:
        """Beyond the bound everything is dropped: the gap in the sequence then asks for a snapshot."""
        with self._lock:
            self._changes.append(change)
            # An empty change still takes memory, so it counts.
            self._hashes += len(change.stored) + len(change.removed) + 1
            if self._hashes > self._max_hashes:
                self._changes.clear()
                self._hashes = 0
                self.lost = True

    def forgive(self) -> None:
        """A snapshot that is taken from now on covers all that was dropped."""
        with self._lock:
            self.lost = False

    def __bool__(self) -> bool:
        return bool(self._changes) or self.lost

    def take(self, written: int) -> _Delta | None:
        """The next delta after sequence `written`; None if there is none. Raises _Gap."""
        with self._lock:
            while self._changes and self._changes[0].sequence <= written:
                self._pop()
            if self.lost:
                raise _Gap
            if not self._changes:
                return None
            sequence = written
            last_word: dict[BlockHash, bool] = {}
            while self._changes and len(last_word) < DELTA_HASHES:
                if self._changes[0].sequence != sequence + 1:
                    if sequence == written:
                        raise _Gap
                    break
                change = self._pop()
                sequence = change.sequence
                last_word.update(dict.fromkeys(change.removed, False))
                last_word.update(dict.fromkeys(change.stored, True))
        return _Delta(
            written,
            sequence,
            stored=pack_hashes(block for block, held in last_word.items() if held),
            removed=pack_hashes(block for block, held in last_word.items() if not held),
        )

    def _pop(self) -> _Change:
        change = self._changes.popleft()
        self._hashes -= len(change.stored) + len(change.removed) + 1
        return change


class _Gap(Exception):
    """The changes at hand do not continue what is written: take a snapshot."""


class WorkerAnnouncer:
    """Keeps one worker's record and block index in Redis. `run` and `withdraw` belong to one event loop."""

    def __init__(
        self,
        redis: str | RedisAccess,
        record: WorkerRecord,
        snapshot: Callable[[], tuple[int, frozenset[BlockHash]]],
        *,
        ttl_ms: int = 5000,
        flush_ms: int = 20,
        max_pending_hashes: int = MAX_PENDING_HASHES,
        list_model: bool = True,
    ) -> None:
        """`snapshot` gives the engine's (sequence, whole set of blocks); it is called on a thread of its own.

        `flush_ms`: at most one round of writes in that time; with many workers it is longer. `list_model`: whether it
        keeps the model in the list of models, which a Redis user of that model alone may not write. Raises
        RedisUrlError.
        """
        self._redis = access_of(redis)
        self._redis.check()
        self._list_model = list_model
        self._ttl_ms = ttl_ms
        self._flush_s = flush_ms / 1000
        self._round_s = self._flush_s
        self._fleet_workers = 0
        self._heartbeat_s = ttl_ms / 4000
        self._snapshot = snapshot
        self._record = msgspec.structs.replace(record, ttl_ms=ttl_ms)
        self._keys = ModelKeys(record.model)
        self._pending = _Pending(max_pending_hashes)
        self._unanswered: _Delta | None = None
        self._written: int | None = None
        self._unanswered_set: int | None = None
        self._record_changed = False
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._superseded = False
        self._outage = Outage()
        self.healthy = False
        """Redis holds what this worker last said."""
        self.republished = 0
        """How often the whole set was written."""

    # -- called by the worker

    def block_change(self, sequence: int, stored: Sequence[BlockHash], removed: Sequence[BlockHash]) -> None:
        """The engine's set changed. From any thread, in order of `sequence`; returns at once; memory is bounded."""
        self._pending.add(_Change(sequence, tuple(stored), tuple(removed)))
        self._notify(self._wake)

    def update(self, record: WorkerRecord) -> None:
        """A new role, draining, another address: written at once. Worker id, incarnation and model stay."""
        current = self._record
        if (record.worker_id, record.incarnation, record.model) != (
            current.worker_id,
            current.incarnation,
            current.model,
        ):
            raise ValueError("an announcer speaks for one incarnation of one worker of one model: make a new one")
        self._record = msgspec.structs.replace(record, ttl_ms=self._ttl_ms)
        self._record_changed = True
        self._notify(self._wake)
        self._notify(self._urgent)

    async def run(self) -> None:
        """Write until cancelled. Survives whatever Redis does. After `withdraw` it only waits for being cancelled."""
        self._loop = asyncio.get_running_loop()
        self._idle.clear()
        backoff = Backoff()
        try:
            while not self._stop.is_set():
                try:
                    async with session(self._redis, backoff) as redis:
                        await self._speak(redis, backoff)
                except SESSION_ERRORS as error:
                    self.healthy = False
                    if self._outage.is_news(error):
                        self._warn(f"going on without redis: {problem(error)}")
                    await _happens_within(self._stop, backoff.next_s())
        finally:
            self.healthy = False
            self._idle.set()
        # Withdrawn. A task that ends by itself would look like a failure to its owner, who alone ends it.
        await asyncio.get_running_loop().create_future()

    async def withdraw(self) -> None:
        """Clean shutdown: stop writing, delete record and index, tell readers. Waits a second or two at most."""
        self._stop.set()
        self._wake.set()
        self._urgent.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMMAND_DEADLINE_S):
                await self._idle.wait()
        worker_id = self._record.worker_id
        keys = self._keys
        try:
            async with session(self._redis, Backoff()) as redis:
                await redis.script(
                    _scripts.WITHDRAW,
                    (keys.record(worker_id), keys.index(worker_id), keys.blocks(worker_id), keys.workers, keys.events),
                    (worker_id, self._record.incarnation, self._index_ttl_ms, EVENTS_KEPT),
                    COMMAND_DEADLINE_S,
                )
        except SESSION_ERRORS as error:
            _log.warning("withdrawal not written, the record runs out by itself worker_id=%s: %s", worker_id, error)

    # -- one session

    async def _speak(self, redis: RedisSession, backoff: Backoff) -> None:
        loop = asyncio.get_running_loop()
        heartbeat_at = loop.time()
        while not self._stop.is_set():
            started = loop.time()
            self._wake.clear()
            self._urgent.clear()
            if started >= heartbeat_at or self._record_changed:
                if await self._heartbeat(redis):
                    self._in_order()
                backoff.succeeded()
                heartbeat_at = started + self._heartbeat_s
            if self.healthy:
                await self._flush(redis, until=heartbeat_at)
            # A floor between rounds, so that a busy engine's steps are written together. A changed record waits less.
            await _happens_within(self._stop, started + self._flush_s - loop.time())
            await _happens_within(self._urgent, min(started + self._round_s, heartbeat_at) - loop.time())
            if not (self.healthy and self._pending):
                await _happens_within(self._wake, heartbeat_at - loop.time())

    async def _heartbeat(self, redis: RedisSession) -> bool:
        """Renew the record; find out whether Redis still holds our set. False: another incarnation owns our id."""
        record = self._record
        self._record_changed = False
        worker_id = record.worker_id
        keys = self._keys
        if self._list_model:
            await redis.script(_scripts.LIST_MODEL, (MODELS_KEY,), (record.model, self._index_ttl_ms), self._deadline_s)
        status, sequence, intact, workers = await redis.script(
            _scripts.HEARTBEAT,
            (keys.record(worker_id), keys.index(worker_id), keys.blocks(worker_id), keys.workers, keys.events),
            (
                worker_id,
                record.incarnation,
                record.started_at_ms,
                encode_record(record),
                self._ttl_ms,
                self._index_ttl_ms,
                EVENTS_KEPT,
            ),
            self._deadline_s,
        )
        if status == WriteStatus.SUPERSEDED:
            self._is_superseded()
            return False
        self._round_s = max(self._flush_s, workers / FLEET_ROUNDS_PER_S)
        if intact and int(sequence) == self._unanswered_set:
            self._set_written(int(sequence))
        # An unanswered delta may or may not be in: writing it once more tells.
        expected = {self._written} | ({self._unanswered.sequence} if self._unanswered else set())
        if int(sequence) not in expected or int(sequence) < 0 or not intact:
            # A Redis that has just been emptied does not know yet how many there are.
            self._fleet_workers = max(self._fleet_workers, workers)
            await _happens_within(self._urgent, random.uniform(0, self._fleet_workers / FLEET_SETS_PER_S))
            return await self._publish(redis)
        self._fleet_workers = workers
        return True

    async def _flush(self, redis: RedisSession, *, until: float) -> None:
        """Write what the engine handed over; what is left when the next heartbeat is due comes after it."""
        loop = asyncio.get_running_loop()
        while not self._stop.is_set() and loop.time() < until:
            if self._unanswered is None:
                try:
                    self._unanswered = self._pending.take(self._written if self._written is not None else -1)
                except _Gap:
                    await self._publish(redis)
                    return
            delta = self._unanswered
            if delta is None:
                return
            worker_id = self._record.worker_id
            (status,) = await redis.script(
                _scripts.WRITE_DELTA,
                (self._keys.index(worker_id), self._keys.blocks(worker_id), self._keys.events),
                (
                    worker_id,
                    self._record.incarnation,
                    delta.previous,
                    delta.sequence,
                    delta.removed,
                    delta.stored,
                    self._index_ttl_ms,
                    EVENTS_KEPT,
                ),
                self._deadline_s,
            )
            if status == WriteStatus.OK:
                self._written, self._unanswered = delta.sequence, None
            else:
                await self._publish(redis)
                return

    async def _publish(self, redis: RedisSession) -> bool:
        """Write the engine's whole set. False: another incarnation owns our id."""
        self._pending.forgive()
        sequence, parts = await asyncio.to_thread(self._packed_snapshot)
        worker_id = self._record.worker_id
        written = uuid.uuid4().hex
        part_key = self._keys.part(worker_id, written)
        for part in parts[:-1]:
            await redis.script(_scripts.WRITE_PART, (part_key,), (part, PART_TTL_MS), self._deadline_s)
        self._unanswered_set = sequence
        (status,) = await redis.script(
            _scripts.WRITE_ALL,
            (self._keys.index(worker_id), self._keys.blocks(worker_id), self._keys.events, part_key),
            (
                worker_id,
                self._record.incarnation,
                self._record.started_at_ms,
                sequence,
                parts[-1],
                sum(len(part) for part in parts) // HASH_BYTES,
                written,
                self._index_ttl_ms,
                EVENTS_KEPT,
            ),
            self._deadline_s,
        )
        self._unanswered_set = None
        if status == WriteStatus.MISMATCH:
            raise PartsLost("a part of the set of blocks was gone before the last one came: does redis evict keys?")
        if status == WriteStatus.SUPERSEDED:
            self._is_superseded()
            return False
        self._set_written(sequence)
        return True

    def _set_written(self, sequence: int) -> None:
        """Redis holds the engine's whole set as of `sequence`: it said so, or its heartbeat shows that it is in."""
        self._written, self._unanswered, self._unanswered_set = sequence, None, None
        self.republished += 1

    def _packed_snapshot(self) -> tuple[int, list[bytes]]:
        """The engine's (sequence, set), in packed parts; at least one, which may be empty."""
        sequence, hashes = self._snapshot()
        packed = pack_hashes(hashes)
        part_bytes = PART_HASHES * HASH_BYTES
        return sequence, [packed[at : at + part_bytes] for at in range(0, len(packed), part_bytes)] or [b""]

    # -- said once per outage

    def _is_superseded(self) -> None:
        self.healthy = False
        if not self._superseded:
            self._superseded = True
            self._warn(_SUPERSEDED)

    def _warn(self, what: str) -> None:
        _log.warning("%s url=%s worker_id=%s", what, self._redis, self._record.worker_id)

    def _in_order(self) -> None:
        if not self.healthy:
            _log.info("announced in redis url=%s worker_id=%s", self._redis, self._record.worker_id)
        self._outage.over()
        self._superseded = False
        self.healthy = True

    @property
    def _deadline_s(self) -> float:
        return fleet_deadline_s(self._fleet_workers)

    @property
    def _index_ttl_ms(self) -> int:
        return self._ttl_ms * INDEX_TTL_FACTOR

    # -- waking

    def _notify(self, event: asyncio.Event) -> None:
        loop = self._loop
        if loop is None or event.is_set():
            return
        # The loop closes only when the process ends; then nobody needs to know.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(event.set)


async def _happens_within(event: asyncio.Event, seconds: float) -> bool:
    if seconds <= 0:
        return event.is_set()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False
