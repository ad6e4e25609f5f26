"""What the planner has to remember, as annotations on its children: the operator itself keeps nothing.

Statuses are for people and may be lost at any time; what decides stands in annotations, each on the object that it is
about. Text that cannot be read (a hand was at it) counts as nothing remembered.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec
from msgspec import Struct

from antiphon_operator.plan.clock import moment
from antiphon_operator.plan.identity import jitter

_FIRST_BACK_OFF_S = 10.0
_LONGEST_BACK_OFF_S = 300.0
_FORGIVEN_AFTER_S = 600.0


class Step(Struct, frozen=True, kw_only=True, rename="camel"):
    """The step that a rollout has reached, on the ControllerRevision of the revision that is coming."""

    asked: dict[str, int]
    """Replicas of the new revision that are asked for, by role."""
    proven: dict[str, int]
    """Of those, how many were ready once: as many old ones may have gone."""
    since: str
    """When the step began; when it was ready and is no more, since then."""
    ready: bool = False
    base: str = ""
    """The revision that is protected until the new one has taken over."""


class PoolMemory(Struct, frozen=True, kw_only=True, rename="camel"):
    """What is remembered on a Pool."""

    next_ordinal: int = 0
    failures: int = 0
    """Gangs that failed, one after the other."""
    failed_at: str = ""
    counted: tuple[int, ...] = ()
    """Ordinals of the gangs behind the last failure: they may stand a while longer, and count once."""
    sized: int | None = None
    """Under Enforce: the number that was applied last. Another one there is somebody else's."""
    edits: int = 0
    """How often somebody else has set the number under Enforce."""

    def failed(self, now: str, ordinals: tuple[int, ...]) -> PoolMemory:
        """These gangs are broken, which is one failure, unless it was counted before: whoever counted it may have
        ended before it could take them down."""
        if set(ordinals) <= set(self.counted):
            return self
        return msgspec.structs.replace(self, failures=self.failures + 1, failed_at=now, counted=ordinals)

    def forgiven(self) -> PoolMemory:
        return msgspec.structs.replace(self, failures=0, failed_at="")

    def retry_at(self, model_uid: str, role: str) -> datetime | None:
        """When the next gang may be made: 10 s after the first failure, doubling up to 5 minutes, each shortened by
        up to a half, so that gangs that failed together do not come back together. None: at once."""
        failed_at = moment(self.failed_at)
        if not self.failures or failed_at is None:
            return None
        longest_s = min(_FIRST_BACK_OFF_S * 2 ** min(self.failures - 1, 10), _LONGEST_BACK_OFF_S)
        return failed_at + timedelta(seconds=longest_s * (1 - jitter(model_uid, role, self.failures) / 2))

    def is_past(self, now: datetime) -> bool:
        """The last failure is long ago: a gang that was ready since then clears the record."""
        failed_at = moment(self.failed_at)
        return failed_at is None or now - failed_at >= timedelta(seconds=_FORGIVEN_AFTER_S)


def read_step(text: object) -> Step | None:
    try:
        step = msgspec.json.decode(str(text), type=Step) if text else None
    except msgspec.MsgspecError:
        return None
    return step if step is not None and moment(step.since) is not None else None


def read_pool_memory(text: object) -> PoolMemory:
    try:
        return msgspec.json.decode(str(text), type=PoolMemory) if text else PoolMemory()
    except msgspec.MsgspecError:
        return PoolMemory()


def write(memory: Step | PoolMemory) -> str:
    """Equal memories give equal texts."""
    return msgspec.json.encode(memory, order="sorted").decode()
