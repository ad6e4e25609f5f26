"""How long replicas take to start and to go, as it is seen: from being made until ready, from the mark of draining
until gone. The law's cool-downs are made of these, so nobody has to set them.

Replicas that were ready when they were seen first say nothing (a pod that was unready for a moment is no start), nor do
those that went without draining.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling.remembered import PoolPast, Remembered

from antiphon_operator.names import Role
from antiphon_operator.plan.scaled_records import ScaledModel, ScaledPool, ScaledReplica

_LEAST_MS = 500.0
"""Times of Kubernetes objects are whole seconds."""
_OVERDUE_SHARE = 0.1
"""One that takes longer than usual is expected within this part of the usual time."""


@dataclass(frozen=True, slots=True)
class _Seen:
    role: Role
    started: bool
    """Its start was measured, or cannot be."""
    draining_since_ms: float | None


class StartTimes:
    """Of one Model. Looks at it whenever it may have changed; what was measured waits for whoever keeps it."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._starts_ms: list[tuple[WorkerRole, float]] = []
        self._drains_ms: list[tuple[WorkerRole, float]] = []

    def looked(self, model: ScaledModel, now_ms: float) -> None:
        does = {pool.role: pool.does for pool in model.pools}
        now = {replica.name: replica for replica in model.replicas}
        for name, before in self._seen.items():
            if name not in now and before.draining_since_ms is not None and before.role in does:
                self._drains_ms.append((does[before.role], max(_LEAST_MS, now_ms - before.draining_since_ms)))
        after = {}
        for name, replica in now.items():
            known = self._seen.get(name)
            started = replica.ready if known is None else known.started
            if not started and replica.ready:
                started = True
                if replica.created_ms is not None and replica.role in does:
                    self._starts_ms.append((does[replica.role], max(_LEAST_MS, now_ms - replica.created_ms)))
            after[name] = _Seen(replica.role, started, replica.draining_since_ms)
        self._seen = after

    def added_to(self, remembered: Remembered) -> Remembered:
        """With all that was measured since the last time."""
        for role, took_ms in self._starts_ms:
            remembered = remembered.with_pool(remembered.of(role).started(took_ms))
        for role, took_ms in self._drains_ms:
            remembered = remembered.with_pool(remembered.of(role).drained(took_ms))
        self._starts_ms, self._drains_ms = [], []
        return remembered


def starting_ms(pool: ScaledPool, replicas: Mapping[str, ScaledReplica], past: PoolPast, now_ms: float) -> list[float]:
    """Of each replica of the pool that starts, the time until it is expected to be ready, the soonest first."""
    found = []
    for replica in replicas.values():
        if replica.role == pool.role and not replica.ready and replica.draining_since_ms is None:
            since_ms = now_ms if replica.created_ms is None else replica.created_ms
            found.append(max(past.start_ms - (now_ms - since_ms), _OVERDUE_SHARE * past.start_ms))
    return sorted(found)
