"""How many replicas each pool should have, and who says so.

The Pool object carries the number. In all modes but External it is ours: the Model's own number under Disabled and
Advise, the autoscaler's under Enforce. What a hand sets under Enforce is taken for meant: it stands, within the bounds,
and is counted (`PoolMemory.edits`); what the autoscaler said before it knew of it is void, and the law leaves such a
size alone for a while. So that a hand's number can be told from ours, the Pool remembers which one we applied last.

Under External it belongs to whoever writes
`/scale`: we go on applying the value that stands there until another manager owns the field, and only then leave it
out of what we apply, so that it is never without an owner and never falls back to a default. Back again, our own
value is applied before anybody else lets go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import msgspec

from antiphon_operator import names
from antiphon_operator.names import Role
from antiphon_operator.plan.memory import PoolMemory
from antiphon_operator.plan.observed import Object, Observed
from antiphon_operator.resource.effective import EffectiveModel, EffectivePool
from antiphon_operator.resource.promise import Bounds


@dataclass(frozen=True, slots=True)
class Sizes:
    """Replicas wanted, by role, in *sets*: a set is the fewest replicas that keep the ratio of the pools."""

    wanted: Mapping[Role, int]

    @property
    def sets(self) -> int:
        """0: nothing is wanted."""
        return gcd(*self.wanted.values())

    @property
    def unit(self) -> dict[Role, int]:
        """Replicas of one set."""
        return {role: count // self.sets if self.sets else 0 for role, count in self.wanted.items()}

    def of_sets(self, sets: int) -> dict[Role, int]:
        return {role: count * sets for role, count in self.unit.items()}


@dataclass(frozen=True, slots=True)
class Scaling:
    """The sizes, and what of them is applied to the Pool objects (None: another manager owns the number)."""

    sizes: Sizes
    applied: Mapping[Role, int | None]
    memories: Mapping[Role, PoolMemory]
    """With what is to be remembered of them."""

    def noted(self, memories: Mapping[Role, PoolMemory]) -> dict[Role, PoolMemory]:
        """`memories` as they became since, with what is remembered of the sizes."""
        return {
            role: msgspec.structs.replace(memory, sized=self.memories[role].sized, edits=self.memories[role].edits)
            if role in self.memories
            else memory
            for role, memory in memories.items()
        }


def scale(
    model: EffectiveModel, observed: Observed, live: Mapping[Role, int], memories: Mapping[Role, PoolMemory]
) -> Scaling:
    """`live`: replicas that there are, by role: what to keep where nothing says how many."""
    pools = {child["metadata"]["name"]: child for child in observed.children if child["kind"] == "Pool"}
    wanted: dict[Role, int] = {}
    applied: dict[Role, int | None] = {}
    after: dict[Role, PoolMemory] = {}
    for pool in model.pools:
        stored = pools.get(names.pool_name(model.name, pool.role))
        memory = memories.get(pool.role, PoolMemory())
        if model.spec.autoscaling.mode == "Enforce":
            wanted[pool.role], after[pool.role] = _enforced(model, pool, stored, observed, memory)
            applied[pool.role] = wanted[pool.role]
            continue
        wanted[pool.role], owned = _one(model, pool, stored, live.get(pool.role, 0))
        applied[pool.role] = wanted[pool.role] if owned else None
        after[pool.role] = msgspec.structs.replace(memory, sized=None)
    return Scaling(Sizes(wanted), applied, after)


def _one(model: EffectiveModel, pool: EffectivePool, stored: Object | None, live: int) -> tuple[int, bool]:
    """The number, and whether it is ours to apply."""
    standing = _standing(stored)
    if model.spec.autoscaling.mode == "External" and stored is not None:
        if standing is None:
            return (live, True)
        return (standing, not _owned_by_another(stored))
    return (pool.spec.replicas, True)


def _enforced(
    model: EffectiveModel, pool: EffectivePool, stored: Object | None, observed: Observed, memory: PoolMemory
) -> tuple[int, PoolMemory]:
    """The number, and what to remember of it."""
    standing, view = _standing(stored), observed.autoscaler
    edited = standing is not None and memory.sized is not None and standing != memory.sized
    edits = memory.edits + edited
    size = pool.spec.replicas if standing is None else standing
    if view is not None and pool.role in view.sizes and view.edits.get(pool.role, 0) == edits:
        size = view.sizes[pool.role]
    wanted = _within(bounds_of(model, pool.role), size)
    return wanted, msgspec.structs.replace(memory, sized=wanted, edits=edits)


def bounds_of(model: EffectiveModel, role: Role) -> Bounds:
    return model.spec.autoscaling.prefill if role == "prefill" else model.spec.autoscaling.decode


def _standing(pool: Object | None) -> int | None:
    """The number that the Pool has."""
    standing = (pool or {}).get("spec", {}).get("replicas")
    return None if standing is None else int(standing)


def _within(bounds: Bounds, count: int) -> int:
    return min(max(count, bounds.min), bounds.max)


def _owned_by_another(pool: Object) -> bool:
    return any(
        "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
        for entry in pool["metadata"].get("managedFields") or ()
        if entry.get("manager") != names.FIELD_MANAGER
    )
