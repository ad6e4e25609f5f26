"""What is promised and how many workers there may be, from the options of `antiphon serve`. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import Promise, TpotTarget, TtftTarget

from antiphon.options import ServeOptions


@dataclass(frozen=True, slots=True)
class Bounds:
    role: WorkerRole
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Goals:
    promise: Promise
    pools: tuple[Bounds, ...]
    """A prefill and a decode pool, or one whose workers do both."""
    most_workers: int
    may_switch: bool
    """Workers of the two pools have one shape."""
    most_drain_ms: float
    """What a worker that is told to end gets."""


def goals_of(options: ServeOptions) -> Goals:
    promise = Promise(
        ttft=TtftTarget(options.sla_ttft_ms, options.sla_ttft_per_thousand_tokens_ms) if options.sla_ttft_ms else None,
        tpot=TpotTarget(options.sla_tpot_ms) if options.sla_tpot_ms else None,
        window_s=options.sla_window_s,
    )
    most, drain_ms = options.most_workers, options.drain_timeout_s * 1e3
    if not options.prefill:
        both = Bounds(WorkerRole.BOTH, options.min_decode, min(options.max_decode or most, most))
        return Goals(promise, (both,), most, may_switch=False, most_drain_ms=drain_ms)
    pools = (
        _bounds(WorkerRole.PREFILL, options.min_prefill, options.max_prefill, most - options.min_decode),
        _bounds(WorkerRole.DECODE, options.min_decode, options.max_decode, most - options.min_prefill),
    )
    return Goals(promise, pools, most, may_switch=_are_alike(options), most_drain_ms=drain_ms)


def _bounds(role: WorkerRole, least: int, most: int, left: int) -> Bounds:
    return Bounds(role, least, max(least, min(most or left, left)))


def _are_alike(options: ServeOptions) -> bool:
    """Whether a prefill worker is what a decode worker is: one rank, which has no shape of its own."""
    return not any(
        getattr(options, f"{role}_{kind}_parallel") > 1
        for role in ("prefill", "decode")
        for kind in ("tensor", "pipeline", "expert")
    )
