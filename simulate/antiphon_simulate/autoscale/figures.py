"""What one run kept and what it cost. `docs/simulator.md` defines each figure; all are taken here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from antiphon_simulate.autoscale.goal import Goal
from antiphon_simulate.autoscale.records import POOLS, Moment, ScaleRun, Sizes
from antiphon_simulate.figures import Percentiles

_REVERSAL_MS = 600_000.0
_BUCKET_MS = 10_000.0
_BACK_BUCKETS = 3
"""It is back inside when so many buckets in succession are."""


@dataclass(frozen=True, slots=True)
class ScaleFigures:
    requests: int
    infeasible_share: float
    attainment: float | None
    """Of the feasible requests, those inside both limits; None: none is feasible."""
    gpu_hours: float
    mean_replicas: float
    mean_prefill: float
    mean_decode: float
    most_replicas: int
    reversals_per_10_min: float
    most_reversals_in_10_min: int
    seconds_back_in_sla: float
    """The longest time outside at a stretch."""
    seconds_outside_sla: float
    starts: int
    switches: int
    failures: int
    moved_streams: int
    unended: int
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    took_s: float


def figures(run: ScaleRun, goal: Goal) -> ScaleFigures:
    feasible = [serving for serving in run.servings if serving.call.feasible]
    inside = sum(serving.is_inside(goal) for serving in feasible)
    prefill_ms, decode_ms = (_alive_ms(run, pool) for pool in range(len(POOLS)))
    reversals = sorted(time_ms for pool in range(len(POOLS)) for time_ms in reversal_times_ms(run.moments, pool))
    outside = outside_ms(run, goal)
    span_ms = run.span_ms or 1.0
    return ScaleFigures(
        requests=len(run.servings),
        infeasible_share=1.0 - len(feasible) / len(run.servings) if run.servings else 0.0,
        attainment=inside / len(feasible) if feasible else None,
        gpu_hours=(prefill_ms + decode_ms) / 3_600_000.0,
        mean_replicas=(prefill_ms + decode_ms) / span_ms,
        mean_prefill=prefill_ms / span_ms,
        mean_decode=decode_ms / span_ms,
        most_replicas=max(moment.alive.total for moment in run.moments),
        reversals_per_10_min=len(reversals) * _REVERSAL_MS / max(span_ms, _REVERSAL_MS),
        most_reversals_in_10_min=max(
            (sum(first <= time_ms < first + _REVERSAL_MS for time_ms in reversals) for first in reversals), default=0
        ),
        seconds_back_in_sla=max(outside, default=0.0) / 1000.0,
        seconds_outside_sla=sum(outside) / 1000.0,
        starts=run.starts,
        switches=run.switches,
        failures=run.failures,
        moved_streams=run.moved_streams,
        unended=sum(serving.ended_ms is None for serving in run.servings),
        ttft_ms=Percentiles.of([serving.ttft_ms or 0.0 for serving in run.servings]),
        tpot_ms=Percentiles.of([serving.tpot_ms or 0.0 for serving in run.servings if serving.call.output_tokens > 1]),
        took_s=run.took_s,
    )


def attainment(run: ScaleRun, goal: Goal) -> float:
    """1 where nothing is feasible."""
    feasible = [serving for serving in run.servings if serving.call.feasible]
    return sum(serving.is_inside(goal) for serving in feasible) / len(feasible) if feasible else 1.0


def gpu_hours(run: ScaleRun) -> float:
    return sum(_alive_ms(run, pool) for pool in range(len(POOLS))) / 3_600_000.0


def reversal_times_ms(moments: Sequence[Moment], pool: int) -> list[float]:
    """When the wanted size of a pool changed against its last change, less than ten minutes after that."""
    times = []
    last_ms, last_up = -_REVERSAL_MS, True
    for before, after in pairwise(moments):
        change = _of(after.wanted, pool) - _of(before.wanted, pool)
        if not change:
            continue
        if (change > 0) != last_up and after.at_ms - last_ms < _REVERSAL_MS:
            times.append(after.at_ms)
        last_ms, last_up = after.at_ms, change > 0
    return times


def outside_ms(run: ScaleRun, goal: Goal) -> list[float]:
    """How long each stretch outside the goal was: from the first bucket of arrivals with less than the target inside to
    the first of three in succession that are inside. Buckets without feasible requests are inside."""
    buckets = int(run.span_ms // _BUCKET_MS) + 1
    came, kept = [0] * buckets, [0] * buckets
    for serving in run.servings:
        if serving.call.feasible:
            at = min(int(serving.arrived_ms // _BUCKET_MS), buckets - 1)
            came[at] += 1
            kept[at] += serving.is_inside(goal)
    stretches = []
    since: int | None = None
    inside_for = 0
    for at in range(buckets):
        if kept[at] < goal.target * came[at]:
            since = at if since is None else since
            inside_for = 0
        elif since is not None:
            inside_for += 1
            if inside_for == _BACK_BUCKETS:
                stretches.append((at + 1 - _BACK_BUCKETS - since) * _BUCKET_MS)
                since, inside_for = None, 0
    if since is not None:
        stretches.append((buckets - inside_for - since) * _BUCKET_MS)
    return stretches


def _alive_ms(run: ScaleRun, pool: int) -> float:
    """Worker-milliseconds that were paid for until the span's end."""
    total = 0.0
    for before, after in pairwise(run.moments):
        total += _of(before.alive, pool) * (min(after.at_ms, run.span_ms) - min(before.at_ms, run.span_ms))
    last = run.moments[-1]
    return total + _of(last.alive, pool) * max(0.0, run.span_ms - last.at_ms)


def _of(sizes: Sizes, pool: int) -> int:
    return sizes.prefill if pool == 0 else sizes.decode
