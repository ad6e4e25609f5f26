"""From what was found of a Model to what the autoscaler is to know of it."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime

from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import Promise, TpotTarget, TtftTarget

from antiphon_operator.names import Role
from antiphon_operator.plan.picture import Picture
from antiphon_operator.plan.replicas import Replica
from antiphon_operator.plan.scaled_records import ScaledModel, ScaledPool, ScaledReplica, ScalingPart
from antiphon_operator.plan.scaling import bounds_of
from antiphon_operator.resource.base import plain
from antiphon_operator.resource.durations import parse_duration_ms
from antiphon_operator.resource.effective import EffectiveModel, EffectivePool
from antiphon_operator.resource.promise import Sla

_PARTS = {"Advise": ScalingPart.ADVISE, "Enforce": ScalingPart.ENFORCE}


def scaled_model(picture: Picture) -> ScaledModel:
    """See the module's docstring."""
    model = picture.state.model
    return ScaledModel(
        uid=model.uid,
        part=_PARTS.get(model.spec.autoscaling.mode, ScalingPart.MEASURE),
        promise=promise_of(model.spec.sla),
        budget_devices=model.spec.autoscaling.gpu_budget,
        pools=tuple(_pool(picture, pool) for pool in model.pools),
        replicas=tuple(_replica(replica) for replica in picture.kept if replica.alive),
    )


def promise_of(sla: Sla) -> Promise:
    """As the law has it."""
    ttft = tpot = None
    if sla.ttft.p95 is not None:
        more = sla.ttft.per_thousand_tokens
        ttft = TtftTarget(float(parse_duration_ms(sla.ttft.p95)), float(parse_duration_ms(more)) if more else 0.0)
    if sla.tpot.p95 is not None:
        tpot = TpotTarget(float(parse_duration_ms(sla.tpot.p95)))
    return Promise(ttft, tpot)


def law_role(model: EffectiveModel, role: Role) -> WorkerRole:
    if model.aggregated:
        return WorkerRole.BOTH
    return WorkerRole.PREFILL if role == "prefill" else WorkerRole.DECODE


def _pool(picture: Picture, pool: EffectivePool) -> ScaledPool:
    model, target = picture.state.model, picture.target
    bounds = bounds_of(model, pool.role)
    return ScaledPool(
        role=pool.role,
        does=law_role(model, pool.role),
        size=picture.scaling.sizes.wanted[pool.role],
        floor=bounds.min,
        ceiling=bounds.max,
        devices=pool.devices,
        shape=_shape(pool),
        revision=target.revision.name if target is not None else "",
        edits=picture.scaling.memories[pool.role].edits,
    )


def _shape(pool: EffectivePool) -> str:
    """Engine and image are the Model's; what may differ between its pools is in their own specs."""
    spec = plain(pool.spec)
    del spec["replicas"]
    told = json.dumps([spec, pool.gpus_per_pod], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def _replica(replica: Replica) -> ScaledReplica:
    return ScaledReplica(
        name=replica.name,
        role=replica.role,
        created_ms=_ms(replica.created),
        ready=replica.ready,
        draining_since_ms=_ms(replica.draining_since),
    )


def _ms(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp() * 1000.0
