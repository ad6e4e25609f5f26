"""The statuses of the Model and of its Pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from antiphon_operator import names
from antiphon_operator.names import Role
from antiphon_operator.plan.clock import stamp
from antiphon_operator.plan.conditions import conditions, pool_trouble
from antiphon_operator.plan.picture import Picture
from antiphon_operator.plan.rollout import Stage
from antiphon_operator.plan.scaling_status import autoscaler_status, sla_status
from antiphon_operator.plan.state import State
from antiphon_operator.resource.effective import effective_dict
from antiphon_operator.resource.reasons import ConditionType, Phase, Reason
from antiphon_operator.resource.status import (
    Condition,
    ModelStatus,
    PoolsStatus,
    PoolStatus,
    PoolSummary,
    ResolvedStatus,
    RevisionStatus,
    pool_summary,
    to_json,
)


def model_status(picture: Picture) -> dict[str, Any]:
    """The Model's."""
    state, told = picture.state, conditions(picture)
    model, target = state.model, picture.target
    old = [name for name in picture.others_alive if name != (picture.base.name if picture.base else "")]
    previous = picture.base.name if picture.base and picture.base.name in picture.others_alive else "".join(old[-1:])
    pools: dict[Role, PoolSummary] = {pool.role: _summary(picture, pool.role) for pool in model.pools}
    weights = target.revision.data.weights if target is not None else None
    status = ModelStatus(
        observed_generation=model.generation,
        phase=phase(picture, told),
        endpoint=state.context.endpoint,
        revision=None
        if target is None and not previous
        else RevisionStatus(current=target.revision.name if target is not None else "", previous=previous),
        resolved=None
        if target is None
        else ResolvedStatus(
            model_revision=weights.revision if weights is not None else "", image=target.revision.data.image
        ),
        pools=PoolsStatus(prefill=pools.get("prefill"), decode=pools.get("decode")),
        sla=sla_status(state),
        autoscaler=autoscaler_status(state),
        conditions=told,
        effective=effective_dict(model),
    )
    return to_json(status)


def refused_status(state: State, told: tuple[Condition, ...]) -> dict[str, Any]:
    """Of a Model that gets no workers."""
    status = ModelStatus(
        observed_generation=state.model.generation,
        phase=Phase.REFUSED,
        endpoint=state.context.endpoint,
        sla=sla_status(state),
        conditions=told,
        effective=effective_dict(state.model),
    )
    return to_json(status)


def pool_statuses(picture: Picture) -> dict[str, Mapping[str, Any]]:
    """Of the Pools, by their names."""
    found: dict[str, Mapping[str, Any]] = {}
    state = picture.state
    stored = {child["metadata"]["name"]: child for child in state.observed.children if child["kind"] == "Pool"}
    for pool in state.model.pools:
        name = names.pool_name(state.model.name, pool.role)
        memory = picture.fleet.memories[pool.role]
        retry_at = memory.retry_at(state.model.uid, pool.role)
        found[name] = to_json(
            PoolStatus(
                observed_generation=int(stored[name]["metadata"].get("generation") or 0) if name in stored else 0,
                replicas=sum(replica.live for replica in picture.kept if replica.role == pool.role),
                ready_replicas=picture.ready(pool.role),
                selector=f"{names.MODEL_LABEL}={state.model.name},{names.ROLE_LABEL}={pool.role},"
                "apps.kubernetes.io/pod-index=0",
                draining=picture.draining(pool.role),
                failures=memory.failures,
                next_attempt_at=stamp(retry_at) if retry_at is not None and retry_at > state.now else "",
                reason=pool_trouble(picture, pool.role).reason,
            )
        )
    return found


def _summary(picture: Picture, role: Role) -> PoolSummary:
    state = picture.state
    devices = 0
    for replica in picture.kept:
        revision = state.revisions.get(replica.revision)
        if replica.alive and replica.role == role and revision is not None and role in revision.data.pools:
            devices += revision.data.pools[role].devices
    return pool_summary(
        desired=picture.scaling.sizes.wanted[role],
        ready=picture.ready(role),
        draining=picture.draining(role),
        gpus=devices if state.model.accelerator is not None else 0,
        reason=pool_trouble(picture, role).reason,
    )


def phase(picture: Picture, told: tuple[Condition, ...]) -> Phase:
    """One word for people."""
    by_type = {condition.type: condition for condition in told}
    is_ready = by_type[ConditionType.READY].status == "True"
    if picture.refused:
        return Phase.REFUSED
    if picture.decision.stage in (Stage.STEPPING, Stage.PAUSED) and is_ready:
        return Phase.ROLLING_OUT
    if is_ready:
        return Phase.RUNNING if by_type[ConditionType.POOLS_READY].status == "True" else Phase.DEGRADED
    if by_type[ConditionType.READY].reason is Reason.SCALED_TO_ZERO:
        return Phase.SLEEPING
    if not picture.source.known and not picture.kept:
        return Phase.PENDING
    served = picture.state.completed is not None
    return Phase.DEGRADED if served else Phase.STARTING
