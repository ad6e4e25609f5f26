"""From wanted numbers to single replicas: which are made, which drain, which go.

Who goes when there are too many: what is not ready before what is; of ready ones the one whose loss costs least, where
gateways tell of workers (`antiphon_policy.scaling.victims`), else the newest, whose cache is worth least. A replica
whose worker may have requests is marked as draining first; it goes when its worker says that it is idle, at the
earliest 3 s after it was marked (gateways must have heard), or at the drain timeout. One that never started goes at
once, and so does one on a lost node: nobody can reach it. When more are wanted again, draining ones are taken back
before new ones are made. In the place of a broken gang none is made before that has been taken down: there may be no
other devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import msgspec
from antiphon_policy.scaling.victims import Candidate, first_to_go

from antiphon_operator.names import ROLES, Role
from antiphon_operator.plan.memory import PoolMemory
from antiphon_operator.plan.observed import WorkerView
from antiphon_operator.plan.replicas import Replica

DRAIN_AT_LEAST_S = 3.0


@dataclass(frozen=True, slots=True)
class Birth:
    """A replica to be made."""

    role: Role
    revision: str
    ordinal: int


@dataclass(frozen=True, slots=True)
class FleetInput:
    """`wanted`: replicas by revision and role. `closed`: roles of gangs that wait for the end of a back-off."""

    replicas: tuple[Replica, ...]
    wanted: Mapping[str, Mapping[Role, int]]
    broken: Mapping[str, str]
    workers: Mapping[str, WorkerView]
    memories: Mapping[Role, PoolMemory]
    closed: frozenset[tuple[str, Role]]
    drain_reason: str
    drain_timeout_s: float
    now: datetime
    lost_ms: Mapping[str, float] = field(default_factory=dict)
    """By worker: what its loss would cost. Empty: not known."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas as they should be."""

    kept: tuple[Replica, ...]
    """With their marks as they should be."""
    deleted: tuple[Replica, ...]
    births: tuple[Birth, ...]
    memories: Mapping[Role, PoolMemory]
    next_at: datetime | None
    """When a drain is to be looked at again."""


def arrange(fleet: FleetInput) -> Fleet:
    """See the module's docstring."""
    kept: list[Replica] = []
    deleted: list[Replica] = []
    births: list[Birth] = []
    memories = dict(fleet.memories)
    groups: dict[tuple[str, Role], list[Replica]] = {}
    for revision, counts in fleet.wanted.items():
        for role in counts:
            groups.setdefault((revision, role), [])
    falling: Counter[tuple[str, Role]] = Counter()
    for replica in fleet.replicas:
        if replica.going:
            kept.append(replica)
        elif replica.lost or replica.name in fleet.broken:
            deleted.append(replica)
            falling[replica.revision, replica.role] += not replica.lost
        else:
            groups.setdefault((replica.revision, replica.role), []).append(replica)
    for (revision, role), members in sorted(groups.items(), key=lambda group: (ROLES.index(group[0][1]), group[0][0])):
        count = fleet.wanted.get(revision, {}).get(role, 0)
        stay, drain = _split(members, count, fleet.lost_ms)
        for replica in drain:
            gone, marked = _drained(replica, fleet)
            (deleted if gone else kept).append(marked)
        kept.extend(stay)
        missing = 0 if (revision, role) in fleet.closed else count - len(stay) - falling[revision, role]
        for _ in range(missing):
            memory = memories[role]
            births.append(Birth(role, revision, memory.next_ordinal))
            memories[role] = _grown(memory)
    return Fleet(tuple(kept), tuple(deleted), tuple(births), memories, _next(kept, fleet))


def _grown(memory: PoolMemory) -> PoolMemory:
    return msgspec.structs.replace(memory, next_ordinal=memory.next_ordinal + 1)


def _split(members: Iterable[Replica], count: int, lost_ms: Mapping[str, float]) -> tuple[list[Replica], list[Replica]]:
    """Those that stay, with no mark, and those that drain. Who drains already goes on with it."""
    by_worker = {replica.worker: replica for replica in members}
    living = [Candidate(one.worker, one.ready, one.ordinal) for one in by_worker.values() if one.live]
    ranked = [by_worker[candidate.worker_id] for candidate in reversed(first_to_go(living, lost_ms))]
    ranked += sorted(
        (replica for replica in by_worker.values() if not replica.live),
        key=lambda replica: (not replica.ready, replica.ordinal, replica.name),
    )
    stay: list[Replica] = []
    drain: list[Replica] = []
    for replica in ranked:
        worth = replica.live or replica.ready
        if len(stay) < count and worth:
            stay.append(replace(replica, draining_since=None, drain_reason=""))
        else:
            drain.append(replica)
    return stay, drain


def _drained(replica: Replica, fleet: FleetInput) -> tuple[bool, Replica]:
    """Whether it may be deleted now, and the replica with its mark."""
    marked = replica
    if replica.draining_since is None:
        marked = replace(replica, draining_since=fleet.now.replace(microsecond=0), drain_reason=fleet.drain_reason)
    if not replica.has_requests:
        return True, marked
    since = marked.draining_since
    assert since is not None
    if fleet.now - since >= timedelta(seconds=fleet.drain_timeout_s) and replica.draining_since is not None:
        return True, marked
    view = fleet.workers.get(replica.worker)
    told = view is not None and view.idle and view.asked_at - since >= timedelta(seconds=DRAIN_AT_LEAST_S)
    return told and replica.draining_since is not None, marked


def _next(kept: Iterable[Replica], fleet: FleetInput) -> datetime | None:
    times = []
    for replica in kept:
        if replica.alive and replica.draining_since is not None:
            soonest = replica.draining_since + timedelta(seconds=DRAIN_AT_LEAST_S)
            poll = fleet.now + timedelta(seconds=1)
            timeout = replica.draining_since + timedelta(seconds=fleet.drain_timeout_s)
            times.append(min(max(soonest, poll), max(timeout, fleet.now)))
    return min(times, default=None)
