"""The scaling law: what was measured goes in, sizes of pools with their reason come out. Pure.

    inputs -> cleaned -> needs (replay, forecast, queue) -> bounds, budget, patience, roles -> sizes, reason, sentence

Whoever calls it (operator, simulator) measures, acts, and keeps the memory that each decision hands back. Asked again
with the inputs that a decision carries, it makes the same decision.

What it holds to, whatever it is given:
- sizes are within bounds and budget;
- without news nothing moves but what bounds and budget demand;
- more load never asks for fewer;
- it shrinks only to what was enough throughout for a while, and so does not swing at a constant load;
- what someone else set is left alone for a while.
"""

from __future__ import annotations

from antiphon_policy.scaling.activity import has_work, last_active_ms
from antiphon_policy.scaling.cleaning import cleaned
from antiphon_policy.scaling.forecast import Forecast
from antiphon_policy.scaling.needs import Need, Needs, needs_of
from antiphon_policy.scaling.patience import resized
from antiphon_policy.scaling.records import (
    PoolSize,
    Prediction,
    RoleSwitch,
    ScalingAction,
    ScalingDecision,
    ScalingInputs,
    ScalingMemory,
    ScalingReason,
)
from antiphon_policy.scaling.replay import Replay
from antiphon_policy.scaling.sentences import sentence, switched
from antiphon_policy.scaling.targets import Target, frozen_sizes, targets_of
from antiphon_policy.scaling.work import Window

STALE_WINDOWS = 0.1
"""News that are older than this part of the promise's window are none."""


def decide(inputs: ScalingInputs) -> ScalingDecision:
    """One decision. Takes some tens of milliseconds with 2,000 samples. Never raises for what was measured."""
    seen = cleaned(inputs)
    if not seen.pools or not _has_news(seen):
        return _frozen(seen)
    needs = needs_of(seen)
    active_ms = last_active_ms(seen)
    targets, switch = targets_of(seen, list(needs.pools), active_ms)
    rps = max((target.need.foreseen.upper_rps for target in targets), default=0.0)
    memory = ScalingMemory(
        tuple(resized(target.memory, target.pool.size, target.size, rps, seen.now_ms) for target in targets), active_ms
    )
    action, reason = _verdict(seen, targets, switch)
    sizes = [_told(target) for target in targets]
    text = sentence(reason, sizes, list(needs.pools), seen.promise)
    return ScalingDecision(
        at_ms=seen.now_ms,
        sizes=tuple(sizes),
        action=action,
        reason=reason,
        sentence=f"{text}; {switched(switch)}" if switch else text,
        memory=memory,
        prediction=_predicted(needs, targets),
        switch=switch,
        inputs=seen,
    )


def _has_news(inputs: ScalingInputs) -> bool:
    most_ms = STALE_WINDOWS * inputs.promise.window_s * 1000.0
    return inputs.news_age_ms is not None and inputs.news_age_ms <= most_ms


def _frozen(seen: ScalingInputs) -> ScalingDecision:
    nothing = Window((), seen.promise.window_s * 1000.0)
    needs = [
        Need(
            pool,
            now=0,
            ahead=0,
            queue=0,
            seen=0,
            surely=0,
            load=Replay(nothing, pool, seen.promise),
            usual=Replay(nothing, pool, seen.promise),
            foreseen=Forecast(),
        )
        for pool in seen.pools
    ]
    sizes = [
        PoolSize(pool.role, size, pool.size) for pool, size in zip(seen.pools, frozen_sizes(seen, needs), strict=True)
    ]
    return ScalingDecision(
        at_ms=seen.now_ms,
        sizes=tuple(sizes),
        action=ScalingAction.FREEZE,
        reason=ScalingReason.NO_NEWS,
        sentence=sentence(ScalingReason.NO_NEWS, sizes, [], seen.promise),
        memory=seen.memory,
        inputs=seen,
    )


def _told(target: Target) -> PoolSize:
    need = target.need
    return PoolSize(
        role=target.pool.role,
        size=target.size,
        before=target.pool.size,
        needed=need.replicas,
        needed_now=need.now,
        needed_ahead=need.ahead,
        needed_queue=need.queue,
        needed_seen=need.seen,
    )


def _verdict(
    inputs: ScalingInputs, targets: list[Target], switch: RoleSwitch | None
) -> tuple[ScalingAction, ScalingReason]:
    grown = [target for target in targets if target.size > target.pool.size]
    shrunk = [target for target in targets if target.size < target.pool.size]
    woken = [target for target in grown if target.pool.size == 0]
    if woken:
        asked = any(not target.idle for target in woken) or any(has_work(pool) for pool in inputs.pools)
        return ScalingAction.WAKE, ScalingReason.REQUESTS_WAIT if asked else ScalingReason.BOUNDS
    if switch:
        return ScalingAction.SWITCH_ROLE, ScalingReason.OTHER_POOL_HAS_SPARE
    if grown:
        return ScalingAction.ADD, _why_more(max(grown, key=lambda target: target.size - target.pool.size))
    if shrunk:
        if all(target.size == 0 for target in shrunk):
            return ScalingAction.TO_ZERO, ScalingReason.IDLE
        return ScalingAction.REMOVE, _why_fewer(shrunk[0])
    return ScalingAction.NONE, _why_not(inputs, targets)


def _why_more(target: Target) -> ScalingReason:
    need, before = target.need, target.pool.size
    if need.replicas <= before:
        return ScalingReason.BOUNDS
    if need.replicas > target.size:
        return ScalingReason.LIMITED
    if need.now > before:
        return ScalingReason.PROMISE_NOW
    if need.ahead > before:
        return ScalingReason.PROMISE_AHEAD
    return ScalingReason.QUEUE if need.queue > before else ScalingReason.SERVED_LATE


def _why_fewer(target: Target) -> ScalingReason:
    if target.idle:
        return ScalingReason.IDLE
    if target.pool.size > target.pool.ceiling or target.need.replicas > target.size:
        return ScalingReason.BOUNDS
    return ScalingReason.SPARE


def _why_not(inputs: ScalingInputs, targets: list[Target]) -> ScalingReason:
    if any(target.left_alone and target.share != target.size for target in targets):
        return ScalingReason.HAND_EDIT
    if inputs.promise.ttft is None and inputs.promise.tpot is None:
        return ScalingReason.NO_PROMISE
    if any(not target.idle and target.need.replicas > target.size for target in targets):
        return ScalingReason.LIMITED
    if any(target.share < target.size for target in targets):
        return ScalingReason.COOLING_DOWN
    return ScalingReason.ENOUGH


def _predicted(needs: Needs, targets: list[Target]) -> Prediction:
    attainment_ttft = attainment_tpot = None
    if needs.window.work:
        late = [target.need.usual.late_share(target.size) for target in targets]
        late_ttft, late_tpot = max(ttft for ttft, _ in late), max(tpot for _, tpot in late)
        attainment_ttft, attainment_tpot = 1.0 - late_ttft, 1.0 - late_tpot
    return Prediction(
        rps=needs.window.rps,
        rps_ahead=max((target.need.foreseen.upper_rps for target in targets), default=0.0),
        attainment_ttft=attainment_ttft,
        attainment_tpot=attainment_tpot,
        infeasible_share=needs.window.infeasible_share,
        observed_attainment=needs.window.attainment,
    )
