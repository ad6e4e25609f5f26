"""From a decision to what is done, cheapest first. Pure.

    a change of role     seconds, and the cache stays
    a start              what the decision still lacks
    an end               what it has too many of: the ones whose loss costs least (`antiphon_policy.scaling.victims`)

It is made from what there is, not from what the last decision did: whatever went wrong since is put right by the same
rule. A worker that starts counts as there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import ScalingDecision
from antiphon_policy.scaling.victims import Candidate, first_to_go


@dataclass(frozen=True, slots=True)
class Worker:
    """One that is wanted."""

    name: str
    role: WorkerRole
    ready: bool
    born: int
    keeps_role: bool = False


@dataclass(frozen=True, slots=True)
class Moves:
    switch: tuple[tuple[str, WorkerRole], ...] = ()
    """Names, and the roles that they take."""
    start: tuple[WorkerRole, ...] = ()
    end: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.switch or self.start or self.end)


def moves_of(decision: ScalingDecision, workers: Sequence[Worker], lost_ms: Mapping[str, float]) -> Moves:
    """`workers`: those that do not leave. `lost_ms`: what the loss of each would cost."""
    wanted = {size.role: size.size for size in decision.sizes}
    there = {role: [worker for worker in workers if worker.role is role] for role in wanted}
    switched = []
    if decision.switch is not None:
        from_role, to_role = decision.switch.from_role, decision.switch.to_role
        able = [worker for worker in there[from_role] if worker.ready and not worker.keeps_role]
        count = min(decision.switch.count, max(0, len(there[from_role]) - wanted[from_role]))
        for worker in _cheapest(able, lost_ms)[:count]:
            switched.append((worker.name, to_role))
            there[from_role].remove(worker)
            there[to_role].append(worker)
    started: list[WorkerRole] = []
    ended: list[str] = []
    for role, size in wanted.items():
        started += [role] * max(0, size - len(there[role]))
        moved = {name for name, _ in switched}
        stay = [worker for worker in there[role] if worker.name not in moved]
        ended += [worker.name for worker in _cheapest(stay, lost_ms)[: max(0, len(there[role]) - size)]]
    return Moves(tuple(switched), tuple(started), tuple(ended))


def _cheapest(workers: Sequence[Worker], lost_ms: Mapping[str, float]) -> list[Worker]:
    by_name = {worker.name: worker for worker in workers}
    order = first_to_go([Candidate(worker.name, worker.ready, worker.born) for worker in workers], lost_ms)
    return [by_name[candidate.worker_id] for candidate in order]
