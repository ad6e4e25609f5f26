"""A Model as the planner shows it to the autoscaler: the promise, the pools as they are, and their replicas."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import Promise

from antiphon_operator.names import Role


class ScalingPart(enum.Enum):
    """What the autoscaler does for a Model."""

    MEASURE = "measure"
    """It tells how the promise is kept and what workers are worth; sizes are others' concern."""
    ADVISE = "advise"
    """It says what it would do, too."""
    ENFORCE = "enforce"
    """What it says is done."""


@dataclass(frozen=True, slots=True)
class ScaledReplica:
    """One replica. Its name is never used again."""

    name: str
    role: Role
    created_ms: float | None
    ready: bool
    draining_since_ms: float | None = None


@dataclass(frozen=True, slots=True)
class ScaledPool:
    """One pool."""

    role: Role
    does: WorkerRole
    """As its workers and the law call it: an aggregated Model's decode pool does both."""
    size: int
    floor: int
    ceiling: int
    devices: int
    shape: str
    """Pools of one shape could give each other workers."""
    revision: str
    edits: int


@dataclass(frozen=True, slots=True)
class ScaledModel:
    """See the module's docstring. Equal ones are the same to the autoscaler."""

    uid: str
    part: ScalingPart
    promise: Promise
    budget_devices: int | None
    pools: tuple[ScaledPool, ...]
    replicas: tuple[ScaledReplica, ...]
    """Those that are not being deleted, of all revisions."""
