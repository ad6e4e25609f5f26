"""The gateway's view of the cluster: which workers there are and what they hold, mirrored from Redis.

`ClusterMirror.run` owns everything: one task that looks for models, one task a model (`_ModelReader`). A reader looks
at all records of its model about once a second, and in between follows the model's event stream, so a new
block is known within milliseconds. Requests are routed from the mirror; Redis is never asked on their way.

Two safety nets make the mirror equal the workers' true contents again after anything that happens to Redis:

* *Continuity.* A delta counts only where it continues what the mirror has; anything else loads that worker anew.
* *Comparison.* Each look brings every worker's (incarnation, sequence) and the last event's id. Once all events up
  to that id are applied, the mirror must be at least there; a worker that is not is loaded anew. So events that
  were trimmed away, a stream that went backward, and a Redis that lost or changed its content all show within one look.

A set is read page by page, and may change meanwhile. It counts as read at the sequence of its *first* page, so the
deltas after that are applied to it as they come, also those that a later page showed already. A block that no such
delta names was there, or not there, all the time, and `SSCAN` tells of it rightly; the others are as the last delta
says. So with the deltas up to the last page the set is exactly right, and no page has to wait for another. A set that
is half read when Redis fails to answer is read on from there, if it is the same Redis that comes back.

While Redis is out of reach the mirror freezes: workers and blocks stay as they were last known. A record that
vanished counts by the rule of `RecordLedger`; the operator's record of a model by that of `ModelLedger`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from antiphon_kvtransfer import _scripts
from antiphon_kvtransfer._events import (
    BlocksDelta,
    BlocksReplaced,
    ClusterEvent,
    EventError,
    RecordChanged,
    Withdrawn,
    decode_event,
    stream_position,
    unpack_hashes,
)
from antiphon_kvtransfer._redis import (
    COMMAND_DEADLINE_S,
    SESSION_ERRORS,
    Backoff,
    Outage,
    RedisSession,
    fleet_deadline_s,
    problem,
    session,
)
from antiphon_kvtransfer.access import RedisAccess, access_of
from antiphon_kvtransfer.identity import BlockHash
from antiphon_kvtransfer.keys import MODELS_KEY, ModelKeys
from antiphon_kvtransfer.mirror import Applied, BlockMirror, Position
from antiphon_kvtransfer.model_record import ModelLedger, ModelRecord, ModelRecordError, decode_model_record
from antiphon_kvtransfer.records import RecordError, RecordLedger, WorkerRecord, decode_record

_log = logging.getLogger("antiphon.membership")

EVENTS_AT_ONCE = 512
WORKERS_AT_ONCE = 250
"""Looked at by one script."""
HASHES_AT_ONCE = 4_000
"""Read by one script. Each holds Redis up for about a millisecond."""
SETS_AT_ONCE = 8
"""So many small sets are read before events are read again."""
EVENTS_GAP_S = 0.01
"""Events are read at most so often: a busy fleet's come many at a time, which costs a fraction of one by one."""
LOOK_GAP_S = 0.1
"""Looks that events ask for are this far apart: a fleet that starts writes an event for each of its records."""


@dataclass(slots=True)
class MirrorCounters:
    """What happened so far, for metrics."""

    reloads: int = 0
    """Whole sets loaded."""
    gaps: int = 0
    """Deltas that did not continue what the mirror had."""
    catch_ups: int = 0
    """Workers found behind or off Redis by comparison."""
    events: int = 0
    unreadable: int = 0
    """Entries of the stream that are no events; skipped."""
    looks: int = 0
    outages: int = 0
    """Sessions with Redis that ended in an error."""


@dataclass(frozen=True, slots=True)
class _Look:
    """One atomic look at a model in Redis."""

    run_id: str
    last_event: bytes
    records: dict[str, bytes]
    positions: dict[str, Position]
    model_record: bytes
    """Empty: there is none."""


@dataclass(frozen=True, slots=True)
class _Page:
    """Some of a worker's set, read at `position`."""

    position: Position
    written: bytes
    """Names the writing of the whole set that this is a page of."""
    next_cursor: bytes
    hashes: list[BlockHash]

    def is_of_one_set_with(self, later: _Page) -> bool:
        """The set was changed by deltas at most, and not replaced, between this page and a later one."""
        return (self.position.incarnation, self.written) == (later.position.incarnation, later.written)


@dataclass(slots=True)
class _HalfRead:
    """A worker's set, page by page. Lives longer than a session: pages that came are not read again."""

    worker_id: str
    first: _Page | None = None
    cursor: bytes = b"0"
    hashes: dict[BlockHash, None] = field(default_factory=dict)


class ClusterMirror:
    """See the module's docstring. Used from one event loop."""

    def __init__(
        self,
        redis: str | RedisAccess,
        *,
        on_change: Callable[[], None],
        look_ms: int = 1000,
        max_blocks: int = 2_000_000,
    ) -> None:
        """`on_change` is called (in `run`'s loop) after `workers()` or `model_records()` changed.

        Raises RedisUrlError.
        """
        self._redis = access_of(redis)
        self._redis.check()
        self._outage = Outage()
        self._on_change = on_change
        self._look_s = look_ms / 1000
        self._blocks = BlockMirror(max_blocks)
        self._readers: dict[str, _ModelReader] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._workers: Mapping[str, WorkerRecord] = MappingProxyType({})
        self._model_records: Mapping[str, ModelRecord] = MappingProxyType({})
        self._directory_healthy = False
        self.counters = MirrorCounters()

    def workers(self) -> Mapping[str, WorkerRecord]:
        """By worker id: an immutable snapshot, replaced by a new one at each change."""
        return self._workers

    def model_records(self) -> Mapping[str, ModelRecord]:
        """What the operator says of its Models, by model: an immutable snapshot, replaced by a new one at each change.

        Also of models without workers. A record that is gone counts as long as its model has workers, and then for one
        full time to live in one unbroken epoch.
        """
        return self._model_records

    @property
    def blocks(self) -> BlockMirror:
        return self._blocks

    @property
    def healthy(self) -> bool:
        """Redis answers, for the list of models and for each model. False before the first answer."""
        return self._directory_healthy and all(reader.healthy for reader in self._readers.values())

    @property
    def epoch(self) -> int:
        """Grows with each restart of Redis and each break in reading it."""
        return sum(reader.epoch for reader in self._readers.values())

    @property
    def reloads(self) -> int:
        return self.counters.reloads

    async def run(self) -> None:
        """Mirror until cancelled. Survives whatever Redis does."""
        backoff = Backoff()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    try:
                        async with session(self._redis, backoff) as redis:
                            await self._follow_models(redis, group, backoff)
                    except SESSION_ERRORS as error:
                        if self._outage.is_news(error):
                            _log.warning("mirror frozen: %s url=%s", problem(error), self._redis)
                        self.counters.outages += 1
                        self._directory_healthy = False
                        await asyncio.sleep(backoff.next_s())
        finally:
            self._directory_healthy = False

    async def _follow_models(self, redis: RedisSession, group: asyncio.TaskGroup, backoff: Backoff) -> None:
        while True:
            names = await redis.script(_scripts.READ_MODELS, (MODELS_KEY,), (), fleet_deadline_s(len(self._workers)))
            if not self._directory_healthy:
                _log.info("redis answers url=%s", self._redis)
            self._directory_healthy = True
            self._outage.over()
            backoff.succeeded()
            models = {name.decode() for name in names}
            for model in models - self._readers.keys():
                reader = _ModelReader(self._redis, model, self._blocks, self._look_s, self.counters, self._changed)
                self._readers[model] = reader
                self._tasks[model] = group.create_task(reader.run(), name=f"mirror of {model}")
            for model in self._readers.keys() - models:
                reader = self._readers[model]
                if reader.healthy and not reader.records and reader.model_record is None:
                    self._tasks.pop(model).cancel()
                    del self._readers[model]
                    self._blocks.forget_model(model)
            await asyncio.sleep(self._look_s / 2)

    def _changed(self) -> None:
        found: dict[str, WorkerRecord] = {}
        for reader in self._readers.values():
            for worker_id, record in reader.records.items():
                other = found.get(worker_id)
                if other is None or other.started_at_ms < record.started_at_ms:
                    found[worker_id] = record
        self._workers = MappingProxyType(found)
        self._model_records = MappingProxyType(
            {model: reader.model_record for model, reader in self._readers.items() if reader.model_record is not None}
        )
        self._on_change()


class _ModelReader:
    """Mirrors one model."""

    def __init__(
        self,
        redis: RedisAccess,
        model: str,
        blocks: BlockMirror,
        look_s: float,
        counters: MirrorCounters,
        on_change: Callable[[], None],
    ) -> None:
        self._redis = redis
        self._model = model
        self._keys = ModelKeys(model)
        self._blocks = blocks
        self._look_s = look_s
        self._counters = counters
        self._on_change = on_change
        self._ledger = RecordLedger(max_gap_s=look_s * 2 + COMMAND_DEADLINE_S)
        self._decoded: dict[str, tuple[bytes, WorkerRecord | None]] = {}
        self._model_ledger = ModelLedger()
        self._model_raw = b""
        self._outage = Outage()
        self._run_id = ""
        self._cursor: bytes | None = None
        # In the order in which they are loaded.
        self._stale: dict[str, None] = {}
        self._half_read: _HalfRead | None = None
        self._look_now = False
        self.healthy = False

    @property
    def records(self) -> Mapping[str, WorkerRecord]:
        return self._ledger.records

    @property
    def model_record(self) -> ModelRecord | None:
        return self._model_ledger.record

    @property
    def epoch(self) -> int:
        return self._ledger.epoch

    @property
    def _deadline_s(self) -> float:
        return fleet_deadline_s(len(self._ledger.records))

    async def run(self) -> None:
        backoff = Backoff()
        while True:
            try:
                async with session(self._redis, backoff) as redis:
                    await self._follow(redis, backoff)
            except SESSION_ERRORS as error:
                if self.healthy and self._outage.is_news(error):
                    _log.warning("mirror frozen: %s model=%s", problem(error), self._model)
                self._counters.outages += 1
                self.healthy = False
                self._ledger.interrupt()
                await asyncio.sleep(backoff.next_s())

    async def _follow(self, redis: RedisSession, backoff: Backoff) -> None:
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            self._look_now = False
            await self._look(redis)
            self._counters.looks += 1
            self.healthy = True
            self._outage.over()
            backoff.succeeded()
            while True:
                # Loading a fleet takes its time: events and looks must not wait for it. But small sets are loaded some
                # at a time, as on a busy machine it is the round trips that take long.
                room = HASHES_AT_ONCE
                while self._stale and room > 0:
                    room -= max(await self._load_one(redis), HASHES_AT_ONCE // SETS_AT_ONCE)
                gap_s = min(LOOK_GAP_S, self._look_s) if self._look_now else self._look_s
                left_s = started + gap_s - loop.time()
                if left_s <= 0:
                    break
                count = await self._read_events(redis, block_ms=None if self._stale else max(1, int(left_s * 1000)))
                if 0 < count < EVENTS_AT_ONCE and not self._stale and not self._look_now:
                    await asyncio.sleep(EVENTS_GAP_S)

    # -- looking

    async def _look(self, redis: RedisSession) -> None:
        """See all records and positions; find the workers whose sets must be loaded."""
        before = {worker: self._blocks.position(self._model, worker) for worker in self._ledger.records}
        look = await self._read_look(redis)
        records = self._decode(look.records)
        known = dict(self._ledger.records)
        now_s = asyncio.get_running_loop().time()
        changed = self._ledger.observe(now_s, look.run_id, records)
        changed |= self._model_ledger.observe(
            now_s,
            self._ledger.epoch,
            self._decode_model_record(look.model_record),
            has_workers=bool(self._ledger.records),
        )
        for worker_id, record in known.items():
            current = self._ledger.records.get(worker_id)
            if current is None or current.incarnation != record.incarnation:
                self._void(worker_id)
        if changed:
            self._on_change()

        if look.run_id != self._run_id or self._went_backward(look.last_event):
            # Another Redis, or one that lost its stream: what we read so far does not continue there.
            self._cursor = look.last_event
            self._stale.update(dict.fromkeys(look.positions))
            self._half_read = None
        else:
            if self._half_read is not None:
                # Before any event is read: those since its first page are to be applied to it.
                await self._load_one(redis)
            await self._read_up_to(redis, look.last_event)
        self._run_id = look.run_id

        for worker_id, there in look.positions.items():
            here, earlier = self._blocks.position(self._model, worker_id), before.get(worker_id)
            behind = here is None or here.incarnation != there.incarnation or here.sequence < there.sequence
            backward = earlier is not None and earlier.sequence > there.sequence
            if worker_id not in self._stale and worker_id in self._ledger.records and (behind or backward):
                self._counters.catch_ups += 1
                self._stale[worker_id] = None
        self._stale.update(dict.fromkeys(self._blocks.incomplete(self._model)))

    async def _read_look(self, redis: RedisSession) -> _Look:
        """Page by page. The last event comes with the last page, so none of the positions is ahead of it."""
        keys = self._keys
        rows: list[list[bytes]] = []
        others: list[bytes] = []
        while True:
            run_id, last_event, page, model_record, rest = await redis.script(
                _scripts.READ_WORKERS,
                (keys.workers, keys.events, keys.model_record),
                (keys.record_prefix, keys.index_prefix, WORKERS_AT_ONCE, *others),
                self._deadline_s,
            )
            rows += page
            others = rest
            if not others:
                break
        return _Look(
            run_id.decode(),
            last_event,
            {worker.decode(): raw for worker, raw, _, _ in rows if raw},
            # A set that was never written has sequence -1: nothing to load yet.
            {
                worker.decode(): Position(incarnation.decode(), int(sequence))
                for worker, _, incarnation, sequence in rows
                if int(sequence) >= 0
            },
            model_record,
        )

    def _decode(self, raw: Mapping[str, bytes]) -> dict[str, WorkerRecord]:
        """Most records are as they were: those are not decoded again. An unreadable one is said once and left out."""
        decoded: dict[str, tuple[bytes, WorkerRecord | None]] = {}
        for worker_id, value in raw.items():
            last = self._decoded.get(worker_id)
            if last is not None and last[0] == value:
                decoded[worker_id] = last
                continue
            try:
                decoded[worker_id] = (value, decode_record(value, worker_id))
            except RecordError as error:
                _log.error("worker ignored model=%s: %s", self._model, error)
                decoded[worker_id] = (value, None)
        self._decoded = decoded
        return {worker_id: record for worker_id, (_, record) in decoded.items() if record is not None}

    def _decode_model_record(self, raw: bytes) -> ModelRecord | None:
        """An unreadable one is said once, and the last good one stays."""
        last = self._model_ledger.record
        if not raw:
            return None
        if raw == self._model_raw and last is not None:
            return last
        try:
            return decode_model_record(raw, self._model)
        except ModelRecordError as error:
            if raw != self._model_raw:
                _log.error("%s", error)
            return last
        finally:
            self._model_raw = raw

    def _went_backward(self, last_event: bytes) -> bool:
        return self._cursor is None or stream_position(last_event) < stream_position(self._cursor)

    # -- events

    async def _read_up_to(self, redis: RedisSession, last_event: bytes) -> None:
        while self._cursor is not None and stream_position(self._cursor) < stream_position(last_event):
            if not await self._read_events(redis, block_ms=None):
                # The stream is gone (it ran out); what it said shows in the comparison.
                self._cursor = last_event

    async def _read_events(self, redis: RedisSession, *, block_ms: int | None) -> int:
        entries = await redis.read_stream(
            self._keys.events,
            self._cursor or b"0-0",
            count=EVENTS_AT_ONCE,
            block_ms=block_ms,
            deadline_s=self._deadline_s,
        )
        for entry_id, fields in entries:
            self._cursor = entry_id
            try:
                event = decode_event(fields)
            except EventError as error:
                # Whatever it was meant to say shows as a gap, or in the next look.
                if not self._counters.unreadable:
                    _log.error("unreadable events are skipped; the first model=%s: %s", self._model, error)
                self._counters.unreadable += 1
                continue
            if event is not None:
                self._counters.events += 1
                self._apply(event)
        return len(entries)

    def _apply(self, event: ClusterEvent) -> None:
        match event:
            case BlocksDelta():
                if event.worker_id in self._stale:
                    return
                applied = self._blocks.apply(
                    self._model,
                    event.worker_id,
                    incarnation=event.incarnation,
                    previous=event.previous,
                    sequence=event.sequence,
                    stored=event.stored,
                    removed=event.removed,
                )
                if applied is Applied.GAP:
                    self._counters.gaps += 1
                    self._stale[event.worker_id] = None
            case BlocksReplaced():
                self._stale[event.worker_id] = None
            case RecordChanged():
                self._look_now = True
            case Withdrawn():
                if self._ledger.withdraw(event.worker_id, event.incarnation):
                    self._void(event.worker_id)
                    self._on_change()

    # -- sets

    async def _load_one(self, redis: RedisSession) -> int:
        """Load the first of the sets that are not known to be right, if there is one; returns how many hashes came.

        A worker leaves the list when its set was looked at; one whose set was replaced meanwhile goes to its end.
        """
        reading = self._half_read
        if reading is None:
            worker_id = next(iter(self._stale), None)
            if worker_id is None:
                return 0
            reading = self._half_read = _HalfRead(worker_id)
        worker_id = reading.worker_id
        while True:
            page = await self._read_page(redis, worker_id, reading.cursor)
            first = reading.first = reading.first or page
            if page is None or first is None or not first.is_of_one_set_with(page):
                break
            reading.hashes.update(dict.fromkeys(page.hashes))
            reading.cursor = page.next_cursor
            if reading.cursor == b"0":
                break
        self._half_read = None
        del self._stale[worker_id]
        record = self._ledger.records.get(worker_id)
        if page is None or first is None or record is None:
            # Not written (yet, or any more): writing it makes an event. What was known stays, as a hint.
            return 0
        if not first.is_of_one_set_with(page):
            self._stale[worker_id] = None
            return len(reading.hashes)
        if first.position.incarnation != record.incarnation:
            # The record of that incarnation is on its way, or was: the next look knows.
            return len(reading.hashes)
        self._blocks.load(self._model, worker_id, first.position, tuple(reading.hashes))
        self._counters.reloads += 1
        return len(reading.hashes)

    async def _read_page(self, redis: RedisSession, worker_id: str, cursor: bytes) -> _Page | None:
        reply = await redis.script(
            _scripts.READ_PAGE,
            (self._keys.index(worker_id), self._keys.blocks(worker_id)),
            (cursor, HASHES_AT_ONCE),
            self._deadline_s,
        )
        if not reply:
            return None
        incarnation, sequence, written, next_cursor, packed = reply
        return _Page(Position(incarnation.decode(), int(sequence)), written, next_cursor, unpack_hashes(packed))

    def _void(self, worker_id: str) -> None:
        """Whatever spoke of that incarnation is void."""
        self._stale.pop(worker_id, None)
        if self._half_read is not None and self._half_read.worker_id == worker_id:
            self._half_read = None
        self._blocks.forget(self._model, worker_id)
