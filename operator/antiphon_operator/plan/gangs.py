"""Replicas of more than one pod are all or nothing.

A gang that is not ready by its deadline holds devices for nothing, and one that lost a member cannot answer: either is
taken down whole and made anew under a new id, after a back-off that grows with each failure in a row. Whether a gang
was whole once is noted on its StatefulSet with a digest of its pods, so a restarted or replaced member shows for ever.
A replica of one pod is left to its kubelet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from antiphon_operator.names import Role
from antiphon_operator.plan.clock import stamp
from antiphon_operator.plan.memory import PoolMemory
from antiphon_operator.plan.replicas import Replica


@dataclass(frozen=True, slots=True)
class GangVerdict:
    """What is to be done with gangs."""

    broken: Mapping[str, str]
    """Names of replicas to take down, with the reason."""
    whole: Mapping[str, str]
    """The digest to note, by name of replica."""
    memories: Mapping[Role, PoolMemory]
    next_deadline: datetime | None


def judge_gangs(
    replicas: Iterable[Replica], memories: Mapping[Role, PoolMemory], deadline_s: float, now: datetime
) -> GangVerdict:
    """See the module's docstring. Failures of one look count as one: they have one cause."""
    broken: dict[str, str] = {}
    whole: dict[str, str] = {}
    after = dict(memories)
    deadlines = []
    for replica in replicas:
        if replica.size < 2 or not replica.alive:
            continue
        if replica.ready and not replica.whole:
            whole[replica.name] = replica.pods_digest
        deadline_at = (replica.created or now) + timedelta(seconds=deadline_s)
        if replica.whole and replica.pods_digest != replica.whole:
            broken[replica.name] = "a member ended or was replaced"
        elif any(pod.failed for pod in replica.standing):
            broken[replica.name] = "a member failed"
        elif not replica.whole and not replica.ready and replica.draining_since is None:
            if deadline_at <= now:
                standing = sum(pod.ready for pod in replica.standing)
                broken[replica.name] = f"{standing} of {replica.size} pods were ready in time"
            else:
                deadlines.append(deadline_at)
    for role, memory in memories.items():
        own = [replica for replica in replicas if replica.role == role]
        failing = tuple(sorted(replica.ordinal for replica in own if replica.name in broken))
        if failing:
            after[role] = memory.failed(stamp(now), failing)
        elif memory.failures and memory.is_past(now) and any(replica.ready for replica in own):
            after[role] = memory.forgiven()
    return GangVerdict(broken, whole, after, min(deadlines, default=None))
