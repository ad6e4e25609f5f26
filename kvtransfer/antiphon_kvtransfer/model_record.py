"""What the operator tells gateways about one Model: one expiring, versioned record in Redis.

The contract between operator and gateways, and all there is of it. The operator writes the record when it changes and
renews it well within its time to live; gateways mirror it and keep the last one they saw while Redis or the operator
is away, for as long as the model has workers. Models without a record (a laptop, workers started by hand) are served
as their workers' cards say.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

RECORD_FORMAT = 1
"""Grows when an older gateway would misread a newer record. New optional fields do not count."""


class ModelRecordError(Exception):
    """Bytes in Redis that are not a model record that this version can read. The message names the key's owner."""


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One Model, as the operator wants gateways to see it."""

    format: int = RECORD_FORMAT
    model: str
    """The model's key: `namespace/name`. Workers of the Model announce themselves under it."""
    generation: int
    """`metadata.generation` of the Model that this record was made from."""
    names: tuple[str, ...]
    """Names that clients use."""
    revisions: Mapping[str, int]
    """Revision -> its ready capacity, in thousandths of the Model's size: its share of new requests. Requests are never
    served by workers of two revisions. A revision that is not named, or has 0, gets requests only where no other
    revision has a worker."""
    draining: tuple[str, ...] = ()
    """Worker ids that get no new requests. A replica's id is never used again, so this covers all its incarnations."""
    ttft_p95_ms: float | None = None
    ttft_per_thousand_tokens_ms: float = 0.0
    """Added to the TTFT promise for each thousand prompt tokens that have to be computed."""
    tpot_p95_ms: float | None = None
    max_context_tokens: int = 0
    """0: what the model allows."""
    isolation: str = "PerTenant"
    """`PerTenant`: tenants never share KV blocks. `Shared`: all do."""
    retry_after_s: int = 10
    """What a client is told to wait while the model has no worker."""
    waking: bool = False
    """The Model is scaled to zero or starting: requests wait in the gateway rather than being refused at once."""
    deleted: bool = False
    """The Model is gone: gateways forget its names once its last worker has left."""
    created_at_ms: int = 0
    """When the Model was made; 0: not said. Of two records with one name the older keeps it."""
    ttl_ms: int = 60_000
    """For how long one write is good."""

    def ttft_limit_ms(self, uncached_tokens: float) -> float | None:
        """What a request is promised of which so many prompt tokens have to be computed; None: nothing."""
        if self.ttft_p95_ms is None:
            return None
        return self.ttft_p95_ms + self.ttft_per_thousand_tokens_ms * uncached_tokens / 1e3


class ModelLedger:
    """The last record of one model that counts. Pure: time and observations come from outside."""

    def __init__(self) -> None:
        self.record: ModelRecord | None = None
        self._missing_since_s: float | None = None
        self._epoch = -1

    def observe(self, now_s: float, epoch: int, seen: ModelRecord | None, *, has_workers: bool) -> bool:
        """One look at `now_s` (monotonic). True if `record` changed.

        `epoch`: of the unbroken stretch of observation (`RecordLedger`) that the look belongs to. `seen`: what stands
        in Redis; None: nothing. While the model has workers, a record that vanished is kept.
        """
        before = self.record
        if epoch != self._epoch or seen is not None or has_workers:
            self._missing_since_s = None
        self._epoch = epoch
        if seen is not None:
            self.record = seen
        elif self.record is not None and not has_workers:
            if self._missing_since_s is None:
                self._missing_since_s = now_s
            if now_s - self._missing_since_s >= self.record.ttl_ms / 1000:
                self.record = None
        if self.record is not None and self.record.deleted and not has_workers:
            self.record = None
        return self.record != before


def encode_model_record(record: ModelRecord) -> bytes:
    """JSON, so that a person at a Redis prompt can read it. Equal records give equal bytes."""
    return msgspec.json.encode(record, order="sorted")


def decode_model_record(raw: bytes, model: str) -> ModelRecord:
    """Raises ModelRecordError. Fields that this version does not know are ignored."""
    try:
        record = msgspec.json.decode(raw, type=ModelRecord)
    except msgspec.MsgspecError as error:
        raise ModelRecordError(
            f"the record of model {model!r} is not readable ({error}): was it written by another version?"
        ) from error
    if record.format != RECORD_FORMAT:
        raise ModelRecordError(
            f"the record of model {model!r} has format {record.format}, this version reads {RECORD_FORMAT}: "
            "upgrade the gateways before the operator"
        )
    return record
