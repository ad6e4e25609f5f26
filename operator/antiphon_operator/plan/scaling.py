"""How many replicas each pool should have, and who says so.

The Pool object carries the number. In all modes but External it is ours. Under External it belongs to whoever writes
`/scale`: we go on applying the value that stands there until another manager owns the field, and only then leave it
out of what we apply, so that it is never without an owner and never falls back to a default. Back again, our own
value is applied before anybody else lets go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

from antiphon_operator import names
from antiphon_operator.names import Role
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


def scale(model: EffectiveModel, observed: Observed, live: Mapping[Role, int]) -> Scaling:
    """`live`: replicas that there are, by role: what to keep where nothing says how many."""
    pools = {child["metadata"]["name"]: child for child in observed.children if child["kind"] == "Pool"}
    wanted: dict[Role, int] = {}
    applied: dict[Role, int | None] = {}
    for pool in model.pools:
        stored = pools.get(names.pool_name(model.name, pool.role))
        wanted[pool.role], owned = _one(model, pool, stored, observed, live.get(pool.role, 0))
        applied[pool.role] = wanted[pool.role] if owned else None
    return Scaling(Sizes(wanted), applied)


def _one(
    model: EffectiveModel, pool: EffectivePool, stored: Object | None, observed: Observed, live: int
) -> tuple[int, bool]:
    """The number, and whether it is ours to apply."""
    autoscaling = model.spec.autoscaling
    standing = (stored or {}).get("spec", {}).get("replicas")
    if autoscaling.mode == "External" and stored is not None:
        if standing is None:
            return (live, True)
        return (int(standing), not _owned_by_another(stored))
    if autoscaling.mode == "Enforce":
        bounds = autoscaling.prefill if pool.role == "prefill" else autoscaling.decode
        advised = observed.recommended_replicas.get(pool.role)
        current = pool.spec.replicas if standing is None else int(standing)
        return (_within(bounds, current if advised is None else advised), True)
    return (pool.spec.replicas, True)


def _within(bounds: Bounds, count: int) -> int:
    return min(max(count, bounds.min), bounds.max)


def _owned_by_another(pool: Object) -> bool:
    return any(
        "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
        for entry in pool["metadata"].get("managedFields") or ()
        if entry.get("manager") != names.FIELD_MANAGER
    )
