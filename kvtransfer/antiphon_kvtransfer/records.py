"""What a worker tells the cluster about itself, and who is believed to exist.

A worker writes its `WorkerRecord` into Redis with a time to live and renews it. Redis is discovery, not a judge of
life: a broken stream to a worker counts at once, a record that vanished does not. Redis may have been restarted
empty, flushed, stopped, or out of reach, and in each case every record is gone while every worker is well.

So `RecordLedger` counts a missing record only after it was missing for one full time to live *inside one unbroken
epoch*: the same Redis process, and no gap in our reading of it. In that time a living worker has written again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

RoleName = Literal["prefill", "decode", "both"]


class RecordError(Exception):
    """Bytes in Redis that are not a worker record. The message names the key's owner."""


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as written by itself. A restarted worker has a new incarnation; a new role has a new version."""

    worker_id: str
    incarnation: str
    role: RoleName
    role_version: int
    model: str
    card_digest: str
    address: str
    """gRPC, host:port."""
    status_address: str
    """HTTP, host:port: metrics, health and status."""
    total_blocks: int
    block_tokens: int
    started_at_ms: int
    """Wall clock. Of two incarnations of one worker id the later started one owns the record."""
    draining: bool = False
    revision: str = ""
    """Of the Model in a cluster. Workers of two revisions are never paired."""
    ttl_ms: int = 5000
    """For how long one write is good. Set by the announcer."""


def encode_record(record: WorkerRecord) -> bytes:
    """JSON, so that a person at a Redis prompt can read it. Equal records give equal bytes."""
    return msgspec.json.encode(record)


def decode_record(raw: bytes, worker_id: str) -> WorkerRecord:
    """Raises RecordError. Fields that this version does not know are ignored."""
    try:
        return msgspec.json.decode(raw, type=WorkerRecord)
    except msgspec.MsgspecError as error:
        raise RecordError(
            f"the record of worker {worker_id!r} is not readable ({error}): is another version of the worker running?"
        ) from error


class RecordLedger:
    """The workers of one model that count as existing. Pure: time and observations come from outside."""

    def __init__(self, max_gap_s: float = 2.5) -> None:
        """`max_gap_s`: two observations further apart than this do not belong to one epoch."""
        self._max_gap_s = max_gap_s
        self._records: dict[str, WorkerRecord] = {}
        self._missing_since_s: dict[str, float] = {}
        self._run_id = ""
        self._observed_at_s: float | None = None
        self.epoch = 0
        """Counts the unbroken stretches of observation so far."""

    @property
    def records(self) -> Mapping[str, WorkerRecord]:
        """By worker id. A live view."""
        return MappingProxyType(self._records)

    def interrupt(self) -> None:
        """Redis could not be read: whatever is missing starts to be missing anew with the next observation."""
        self._observed_at_s = None

    def observe(self, now_s: float, run_id: str, records: Mapping[str, WorkerRecord]) -> bool:
        """All records that Redis process `run_id` shows at `now_s` (monotonic). True if `records` changed."""
        unbroken = (
            self._observed_at_s is not None
            and run_id == self._run_id
            and now_s - self._observed_at_s <= self._max_gap_s
        )
        if not unbroken:
            self.epoch += 1
            self._missing_since_s.clear()
        self._run_id = run_id
        self._observed_at_s = now_s
        changed = False
        for worker_id, record in records.items():
            self._missing_since_s.pop(worker_id, None)
            if self._records.get(worker_id) != record:
                self._records[worker_id] = record
                changed = True
        for worker_id in self._records.keys() - records.keys():
            since_s = self._missing_since_s.setdefault(worker_id, now_s)
            if now_s - since_s >= self._records[worker_id].ttl_ms / 1000:
                self._drop(worker_id)
                changed = True
        return changed

    def withdraw(self, worker_id: str, incarnation: str) -> bool:
        """The worker itself said that it ends: counts at once. True if it was known under that incarnation."""
        record = self._records.get(worker_id)
        if record is None or record.incarnation != incarnation:
            return False
        self._drop(worker_id)
        return True

    def _drop(self, worker_id: str) -> None:
        del self._records[worker_id]
        self._missing_since_s.pop(worker_id, None)
