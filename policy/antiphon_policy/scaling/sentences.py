"""A decision in a sentence, with the numbers that a person needs to check it."""

from __future__ import annotations

from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling.needs import Need
from antiphon_policy.scaling.records import PoolSize, Promise, RoleSwitch, ScalingReason

_WHY = {
    ScalingReason.ENOUGH: "the sizes keep the promise",
    ScalingReason.PROMISE_NOW: "the load of the window needs more",
    ScalingReason.PROMISE_AHEAD: "the load that is foreseen needs more",
    ScalingReason.QUEUE: "what is queued or running now needs more",
    ScalingReason.SERVED_LATE: "more were served late than may be",
    ScalingReason.OTHER_POOL_HAS_SPARE: "a worker changes its role, as its pool can spare it",
    ScalingReason.SPARE: "the survivors keep the promise",
    ScalingReason.IDLE: "there were no requests for long",
    ScalingReason.REQUESTS_WAIT: "requests want a pool that sleeps",
    ScalingReason.COOLING_DOWN: "fewer would do, but more were needed a short time ago",
    ScalingReason.HAND_EDIT: "someone set a size by hand; it is left alone for ten minutes",
    ScalingReason.LIMITED: "more is needed than bounds, budget or devices that still drain allow",
    ScalingReason.BOUNDS: "a size was outside its bounds or the budget",
    ScalingReason.NO_NEWS: "nothing new is known of the load; the sizes stay",
    ScalingReason.NO_PROMISE: "nothing is promised, so nothing asks for another size",
}


def sentence(reason: ScalingReason, sizes: list[PoolSize], needs: list[Need], promise: Promise) -> str:
    """`needs`: of the same pools; empty where nothing is known."""
    parts = [_WHY[reason]]
    for at, size in enumerate(sizes):
        parts.append(_of_pool(size, needs[at] if needs else None))
    if needs:
        parts.append(_of_load(needs))
        parts.append(_of_promise(promise))
    return "; ".join(part for part in parts if part)


def _of_pool(size: PoolSize, need: Need | None) -> str:
    moves = f"stays at {size.size}" if size.size == size.before else f"{size.before} -> {size.size}"
    if need is None:
        return f"{size.role.value} {moves}"
    ceiling = max(1, need.pool.ceiling)
    # A need above the ceiling is not looked for.
    figures = [f"more than {ceiling}" if each > ceiling else str(each) for each in (need.now, need.ahead, need.queue)]
    waits = f", {need.pool.queued_tokens} tokens queued" if need.pool.queued_tokens else ""
    runs = f", {need.pool.running} answers running" if need.pool.running else ""
    starts = f", {len(need.pool.starting_ms)} starting" if need.pool.starting_ms else ""
    late = f", {need.seen} for what was served late" if need.seen else ""
    return (
        f"{size.role.value} {moves}: needs {figures[0]} for the window, {figures[1]} ahead, {figures[2]} for what is"
        f" there now{late} ({need.pool.ready} ready{starts}{waits}{runs})"
    )


def _of_load(needs: list[Need]) -> str:
    foreseen = max((need.foreseen for need in needs), key=lambda one: one.upper_rps)
    return (
        f"{foreseen.now_rps:.2f} requests/s now, up to {foreseen.upper_rps:.2f} in {foreseen.horizon_ms / 1000.0:.0f} s"
        if foreseen.horizon_ms
        else ""
    )


def _of_promise(promise: Promise) -> str:
    said = []
    if promise.ttft is not None:
        slope = promise.ttft.per_thousand_tokens_ms
        said.append(
            f"TTFT {promise.ttft.base_ms:g} ms{f' + {slope:g} ms per 1,000 tokens' if slope else ''}"
            f" for {100.0 * promise.ttft.percentile:g} %"
        )
    if promise.tpot is not None:
        said.append(f"TPOT {promise.tpot.limit_ms:g} ms for {100.0 * promise.tpot.percentile:g} %")
    return f"promised: {', '.join(said)}" if said else ""


def switched(switch: RoleSwitch) -> str:
    workers = "worker" if switch.count == 1 else "workers"
    return f"{switch.count} {workers} from {_name(switch.from_role)} to {_name(switch.to_role)}"


def _name(role: WorkerRole) -> str:
    return role.value
