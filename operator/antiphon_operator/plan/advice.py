"""From the law's decision, or from news alone, to what the planner is shown (`AutoscalerView`). Pure.

That a pool is held back by its bounds or the budget is said for a while after it was last so (`LIMITED_FOR_MS`): at the
edge it comes and goes from look to look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import (
    GatewayNews,
    PoolView,
    RequestSample,
    ScalingAction,
    ScalingDecision,
    ScalingReason,
    WorkerFigures,
)
from antiphon_policy.scaling.needs import work_places
from antiphon_policy.scaling.remembered import Told
from antiphon_policy.scaling.work import window_of

from antiphon_operator.plan.observed import AutoscalerView, Limit
from antiphon_operator.plan.scaled_records import ScaledModel
from antiphon_operator.resource.reasons import Reason

LIMITED_FOR_MS = 60_000.0
SAID_FOR_MS = 30_000.0


@dataclass(frozen=True, slots=True)
class LimitSeen:
    """The last time that something was held back."""

    limit: Limit
    at_ms: float


def view_of(
    decision: ScalingDecision,
    model: ScaledModel,
    told: Told,
    seen: LimitSeen | None,
    switched: ScalingDecision | None,
    lost_ms: Mapping[str, float],
) -> AutoscalerView:
    """`switched`: what would be decided if workers could change their roles; None: it was not asked."""
    held = seen is not None and decision.at_ms - seen.at_ms < LIMITED_FOR_MS
    samples = decision.inputs.samples if decision.inputs is not None else ()
    return AutoscalerView(
        sizes={pool.role: size for pool, size in zip(model.pools, told.sizes, strict=True)},
        edits={pool.role: pool.edits for pool in model.pools},
        told=told,
        limit=seen.limit if seen is not None and held else None,
        silent=decision.action is ScalingAction.FREEZE,
        attainment=decision.prediction.observed_attainment,
        ttft_p95_ms=percentile((sample.ttft_ms, sample.weight) for sample in samples),
        tpot_p95_ms=percentile((sample.tpot_ms, sample.weight) for sample in _long(samples)),
        window_s=model.promise.window_s,
        advice=_switch_advice(switched),
        lost_ms=lost_ms,
    )


def said_lately(told: Told, decision: ScalingDecision) -> bool:
    """Advice that nobody takes follows the load up and down, without the calm of sizes that are. More is said at once,
    less after a while, or the status would change with every look."""
    same = len(told.sizes) == len(decision.sizes) and (
        (told.action is ScalingAction.FREEZE) == (decision.action is ScalingAction.FREEZE)
    )
    grows = any(pool.size > before for pool, before in zip(decision.sizes, told.sizes, strict=False))
    return same and not grows and decision.at_ms - told.at_ms < SAID_FOR_MS


def measured_of(
    news: Sequence[GatewayNews],
    model: ScaledModel,
    figures: Sequence[WorkerFigures | None],
    now_ms: float,
    lost_ms: Mapping[str, float],
) -> AutoscalerView:
    """Of a Model about whose sizes the autoscaler has no say. `figures`: of each pool's workers; which requests nobody
    could have served in time is known only where they have told theirs."""
    begins_ms = now_ms - 1000.0 * model.promise.window_s
    samples = [sample for one in news for sample in one.samples if begins_ms <= sample.at_ms <= now_ms]
    views = tuple(
        PoolView(
            pool.does,
            pool.size,
            pool.size,
            step=known.step,
            chunk_tokens=known.chunk_tokens,
            kv_capacity_tokens=known.kv_capacity_tokens,
        )
        for pool, known in zip(model.pools, figures, strict=True)
        if known is not None
    )
    attainment = None
    if len(views) == len(model.pools):
        attainment = window_of(samples, now_ms, model.promise, *work_places(views)).attainment
    return AutoscalerView(
        attainment=attainment,
        ttft_p95_ms=percentile((sample.ttft_ms, sample.weight) for sample in samples),
        tpot_p95_ms=percentile((sample.tpot_ms, sample.weight) for sample in _long(samples)),
        window_s=model.promise.window_s,
        lost_ms=lost_ms,
    )


def limit_of(decision: ScalingDecision, model: ScaledModel) -> Limit | None:
    """What keeps the pools from what they need; None: nothing, or what is needed is not known."""
    if decision.action is ScalingAction.FREEZE or decision.reason is ScalingReason.HAND_EDIT:
        return None
    for pool, size in zip(model.pools, decision.sizes, strict=True):
        if size.needed <= size.size:
            continue
        if size.size >= pool.ceiling:
            return Limit(
                Reason.CEILING,
                f"The {pool.role} pool needs more than the {pool.ceiling} replicas that it may have: raise "
                f"spec.autoscaling.{pool.role}.max, or promise less.",
            )
        if model.budget_devices is not None:
            return Limit(
                Reason.BUDGET,
                f"The {pool.role} pool needs {size.needed} replicas and has {size.size} of a budget of "
                f"{model.budget_devices} devices: raise spec.autoscaling.gpuBudget, or promise less.",
            )
    return None


def percentile(measured: Iterable[tuple[float | None, float]], share: float = 0.95) -> float | None:
    """The least value that `share` of the weight does not exceed; None: nothing was measured."""
    known = sorted((value, weight) for value, weight in measured if value is not None)
    whole, passed = sum(weight for _, weight in known), 0.0
    for value, weight in known:
        passed += weight
        if passed >= share * whole:
            return value
    return None


def _long(samples: Iterable[RequestSample]) -> Iterable[RequestSample]:
    """Answers that have a second token to wait for."""
    return (sample for sample in samples if sample.output_tokens > 1)


def _switch_advice(switched: ScalingDecision | None) -> str:
    if switched is None or switched.switch is None:
        return ""
    switch, names = switched.switch, {WorkerRole.PREFILL: "prefill", WorkerRole.DECODE: "decode"}
    workers = "worker" if switch.count == 1 else "workers"
    return (
        f"{switch.count} {workers} of the {names.get(switch.from_role, 'other')} pool could do "
        f"{names.get(switch.to_role, 'other')} instead, sooner than new ones start; pools of a cluster cannot share "
        "pods yet, so replicas are added."
    )
