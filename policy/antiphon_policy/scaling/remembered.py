"""What whoever decides keeps between two decisions and over its own end, and what it writes down of each decision.

All of it is JSON in Redis (`ModelKeys.scaling`, `ModelKeys.decisions`): a new operator, or a restarted supervisor, goes
on where the one before it stopped. Losing it costs calm, never a promise: the law begins carefully without a memory.
"""

from __future__ import annotations

import statistics

import msgspec

from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling.assembly import WorkerFigures
from antiphon_policy.scaling.history import History
from antiphon_policy.scaling.records import ScalingAction, ScalingDecision, ScalingMemory, ScalingReason

MEMORY_FORMAT = 1
"""Grows when an older reader would misread what a newer one wrote. New optional fields do not count."""

MOST_DECISIONS = 200
MOST_DECISIONS_BYTES = 16_000_000
"""Of one Model: a decision with a full window is some 100 kB."""

_MOST_TIMES = 8
DEFAULT_START_MS = 60_000.0
DEFAULT_DRAIN_MS = 30_000.0


class RememberedError(Exception):
    """Bytes that are no memory, or no decision, which this version can read. The message says what to do."""


class PoolPast(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was measured of one pool."""

    role: WorkerRole
    starts_ms: tuple[float, ...] = ()
    """From asking for a worker until it was ready: the last ones, oldest first."""
    drains_ms: tuple[float, ...] = ()
    """From asking a worker to go until it was gone."""
    figures: WorkerFigures = WorkerFigures()
    """Of its workers, as last known."""

    @property
    def start_ms(self) -> float:
        return statistics.median(self.starts_ms) if self.starts_ms else DEFAULT_START_MS

    @property
    def drain_ms(self) -> float:
        return statistics.median(self.drains_ms) if self.drains_ms else DEFAULT_DRAIN_MS

    def started(self, took_ms: float) -> PoolPast:
        return msgspec.structs.replace(self, starts_ms=(*self.starts_ms, took_ms)[-_MOST_TIMES:])

    def drained(self, took_ms: float) -> PoolPast:
        return msgspec.structs.replace(self, drains_ms=(*self.drains_ms, took_ms)[-_MOST_TIMES:])


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last decision that changed something, as people are told of it."""

    at_ms: float
    action: ScalingAction
    reason: ScalingReason
    sentence: str
    sizes: tuple[int, ...] = ()
    """In the order of the decision's pools."""


def told_after(told: Told | None, decision: ScalingDecision) -> Told:
    """The same again while nothing new is decided. What only goes on (advice that nobody takes, news that are still
    missing) and the rest after what was done are no news; that there are news again is."""
    sizes = tuple(pool.size for pool in decision.sizes)
    if told is not None and told.sizes == sizes:
        rests = decision.action is ScalingAction.NONE and told.action is not ScalingAction.FREEZE
        if rests or told.action is decision.action:
            return told
    return Told(decision.at_ms, decision.action, decision.reason, decision.sentence, sizes)


class Remembered(msgspec.Struct, frozen=True, omit_defaults=True):
    """See the module's docstring."""

    format: int = MEMORY_FORMAT
    owner: str = ""
    """Whose memory it is (the uid of a Model): a namesake begins anew."""
    memory: ScalingMemory = ScalingMemory()
    history: History = History()
    pools: tuple[PoolPast, ...] = ()
    told: Told | None = None

    def of(self, role: WorkerRole) -> PoolPast:
        return next((pool for pool in self.pools if pool.role is role), PoolPast(role))

    def with_pool(self, past: PoolPast) -> Remembered:
        others = tuple(pool for pool in self.pools if pool.role is not past.role)
        return msgspec.structs.replace(self, pools=(*others, past))


def encode_remembered(remembered: Remembered) -> bytes:
    return msgspec.json.encode(remembered)


def decode_remembered(raw: bytes) -> Remembered:
    """Raises RememberedError. Fields that this version does not know are ignored."""
    try:
        remembered = msgspec.json.decode(raw, type=Remembered)
    except msgspec.MsgspecError as error:
        raise RememberedError(f"what was remembered for scaling is not readable ({error}): begin anew") from error
    if remembered.format > MEMORY_FORMAT:
        raise RememberedError(
            f"what was remembered for scaling has format {remembered.format}, this version reads up to "
            f"{MEMORY_FORMAT}: it was written by a newer version; begin anew or go back to that"
        )
    return remembered


def encode_decision(decision: ScalingDecision) -> bytes:
    """With its inputs, so that it can be made again."""
    return msgspec.json.encode(decision)


def decode_decision(raw: bytes) -> ScalingDecision:
    """Raises RememberedError."""
    try:
        return msgspec.json.decode(raw, type=ScalingDecision)
    except msgspec.MsgspecError as error:
        raise RememberedError(f"this is no decision of this version ({error})") from error


def most_decisions(decision_bytes: int) -> int:
    """How many to keep if all are as large as this one."""
    return max(10, min(MOST_DECISIONS, MOST_DECISIONS_BYTES // max(1, decision_bytes)))
