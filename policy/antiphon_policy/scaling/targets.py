"""From needs to sizes: bounds, budget, patience, and a change of roles where that is cheaper than a new worker.

Bounds and budget hold whatever else is so. (Floors that are more than the budget win over it: someone asked for them by
name.) Devices of workers that drain are not free yet, so what is to grow waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from antiphon_policy.scaling.activity import is_idle
from antiphon_policy.scaling.budget import Claim, shared
from antiphon_policy.scaling.needs import Need
from antiphon_policy.scaling.patience import is_left_alone, least_size, noticed, spare_size
from antiphon_policy.scaling.records import PoolMemory, PoolView, RoleSwitch, ScalingInputs


@dataclass(frozen=True, slots=True)
class Target:
    """Of one pool."""

    need: Need
    memory: PoolMemory
    share: int
    """What it should have: its need in bounds and budget."""
    size: int
    """What it is to have now."""
    idle: bool
    left_alone: bool

    @property
    def pool(self) -> PoolView:
        return self.need.pool


def bounded(pool: PoolView, size: int) -> int:
    return min(max(size, pool.floor), pool.ceiling)


def frozen_sizes(inputs: ScalingInputs, needs: list[Need]) -> list[int]:
    """What bounds and budget make of the sizes that there are."""
    claims = [
        Claim(need.pool.floor, bounded(need.pool, need.pool.size), need.pool.devices, need.load) for need in needs
    ]
    return shared(claims, inputs.budget_devices)


def targets_of(
    inputs: ScalingInputs, needs: list[Need], active_ms: float | None
) -> tuple[list[Target], RoleSwitch | None]:
    now_ms, budget = inputs.now_ms, inputs.budget_devices
    is_promised = inputs.promise.ttft is not None or inputs.promise.tpot is not None
    idle = [is_idle(need.pool, active_ms, now_ms) for need in needs]
    memories = [inputs.memory.of(need.pool.role) for need in needs]
    claims = []
    for need, sleeps in zip(needs, idle, strict=True):
        pool = need.pool
        needed = 0 if sleeps else max(1, need.replicas if is_promised else pool.size)
        least = pool.floor if sleeps else bounded(pool, 1)
        claims.append(Claim(least, bounded(pool, needed), pool.devices, need.load))
    if budget is not None and sum(claim.least * claim.devices for claim in claims) > budget:
        claims = [replace(claim, least=need.pool.floor) for claim, need in zip(claims, needs, strict=True)]
    shares = shared(claims, budget)
    # What others set counts before what we would like: nobody is given what they keep.
    memories = [
        noticed(memory, need.pool, bounded(need.pool, 0 if sleeps else max(share, need.surely)), now_ms)
        for memory, need, share, sleeps in zip(memories, needs, shares, idle, strict=True)
    ]
    alone = [is_left_alone(memory, now_ms) for memory in memories]
    standing = frozen_sizes(inputs, needs)
    targets = [
        Target(need, memory, share, _size(need, memory, share, stands, now_ms, sleeps, left), sleeps, left)
        for need, memory, share, stands, sleeps, left in zip(
            needs, memories, shares, standing, idle, alone, strict=True
        )
    ]
    targets, switch = _switched(inputs, targets)
    return _affordable(inputs, targets, switch), switch


def _size(
    need: Need, memory: PoolMemory, share: int, standing: int, now_ms: float, sleeps: bool, left_alone: bool
) -> int:
    """`standing`: its size in bounds and budget."""
    pool, rps = need.pool, need.foreseen.upper_rps
    if left_alone or share == standing:
        return standing
    if share > standing or sleeps:
        return share
    return min(standing, max(share, bounded(pool, least_size(memory, pool, rps, now_ms))))


def _switched(inputs: ScalingInputs, targets: list[Target]) -> tuple[list[Target], RoleSwitch | None]:
    if not inputs.may_switch or len(targets) != 2 or any(target.left_alone for target in targets):
        return targets, None
    for at, target in enumerate(targets):
        other = targets[1 - at]
        grows = target.size - target.pool.size
        if grows <= 0 or not target.pool.shape or target.pool.shape != other.pool.shape:
            continue
        # A pool does not give its last worker away for as long as anybody asks for something. One that ends anyway
        # had better go on in the other role.
        spares = min(spare_size(other.memory, other.pool, inputs.now_ms), other.size)
        keeps = max(spares, other.share, other.pool.floor, 1)
        count = min(grows, other.pool.size - keeps, other.pool.ready)
        if count > 0:
            gives = replace(other, size=min(other.size, other.pool.size - count))
            switch = RoleSwitch(other.pool.role, target.pool.role, count)
            return ([target, gives] if at == 0 else [gives, target]), switch
    return targets, None


def _affordable(inputs: ScalingInputs, targets: list[Target], switch: RoleSwitch | None) -> list[Target]:
    """Growth that devices which are not free yet would be needed for waits."""
    if inputs.budget_devices is None:
        return targets
    taken = sum((target.pool.size + target.pool.draining) * target.pool.devices for target in targets)
    stays = [
        min(target.size, target.pool.size) if target.pool.size >= target.pool.floor else target.size
        for target in targets
    ]
    if switch:
        stays = [
            stay + (switch.count if target.pool.role is switch.to_role else 0)
            for stay, target in zip(stays, targets, strict=True)
        ]
    cap = sum(stay * target.pool.devices for stay, target in zip(stays, targets, strict=True))
    cap += max(0, inputs.budget_devices - taken)
    claims = [
        Claim(stay, target.size, target.pool.devices, target.need.load)
        for stay, target in zip(stays, targets, strict=True)
    ]
    return [replace(target, size=size) for target, size in zip(targets, shared(claims, cap), strict=True)]
