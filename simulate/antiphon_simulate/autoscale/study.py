"""One load under many scalers, beside the oracle: what `antiphon simulate autoscale` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from antiphon_policy.scaling import ScalingDecision

from antiphon_simulate.autoscale.calls import Load
from antiphon_simulate.autoscale.cluster import run
from antiphon_simulate.autoscale.figures import ScaleFigures, attainment, figures
from antiphon_simulate.autoscale.jumps import jump_workers
from antiphon_simulate.autoscale.oracle import run_schedule
from antiphon_simulate.autoscale.records import ScaleRun, Setting, Sizes
from antiphon_simulate.autoscale.reference import Reference
from antiphon_simulate.autoscale.registry import Known, make

CAUSAL_POINTS = 0.03
"""A law may be so far below the best causal one where arrivals jump faster than a worker starts."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """One policy."""

    name: str
    figures: ScaleFigures
    gpu_hours_over_oracle: float
    gpu_hours_over_bound: float
    extra_replicas: float
    """Mean workers above the oracle's."""
    is_cheap: bool
    """At most the larger of a tenth and one replica above the oracle."""
    keeps: bool
    """Enough are inside (`Study.asked_attainment`)."""
    run: ScaleRun


@dataclass(frozen=True, slots=True)
class Study:
    load: Load
    setting: Setting
    begin: Sizes
    seed: int
    reference: Reference
    oracle_run: ScaleRun
    oracle_figures: ScaleFigures
    jump_workers: float
    """See `jumps`."""
    scaled: Sequence[Scaled]

    @property
    def jumps(self) -> bool:
        """Arrivals jump faster than a worker starts."""
        return self.jump_workers >= 1.0

    @property
    def asked_attainment(self) -> float:
        return asked(self.reference, self.setting, jumps=self.jumps)


def asked(reference: Reference, setting: Setting, *, jumps: bool) -> float:
    """Of a law: the target; where the load jumps, `CAUSAL_POINTS` below the best causal law, and never more."""
    target = setting.goal.target
    return min(target, max(0.0, reference.causal_attainment - CAUSAL_POINTS)) if jumps else target


def study(
    load: Load,
    setting: Setting,
    names: Sequence[str],
    reference: Reference,
    *,
    seed: int = 0,
    interval_ms: float = 5_000.0,
    begin: Sizes | None = None,
    keep: Callable[[ScalingDecision], None] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Study:
    """`begin`: pools at the start; None: as the oracle begins. `keep`: gets Antiphon's decisions."""
    start = begin or reference.begin
    oracle_run = run_schedule(load, setting, reference.sizes, reference.slot_ms, seed=seed)
    best = figures(oracle_run, setting.goal)
    jump = jump_workers(load, setting)
    enough = asked(reference, setting, jumps=jump >= 1.0)
    known = Known(load, setting, reference.peak, interval_ms, keep)
    scaled = []
    for name in names:
        # Sizes that never change are there from the start.
        first = {"static_peak": reference.peak}.get(name, start)
        result = run(load, setting, make(name, known), first, seed=seed)
        scaled.append(_scaled(name, result, setting, reference, best, enough))
        say(f"{name}: {100.0 * attainment(result, setting.goal):.2f} % inside, {result.took_s:.1f} s")
    return Study(
        load=load,
        setting=setting,
        begin=start,
        seed=seed,
        reference=reference,
        oracle_run=oracle_run,
        oracle_figures=best,
        jump_workers=jump,
        scaled=scaled,
    )


def _scaled(
    name: str, result: ScaleRun, setting: Setting, reference: Reference, best: ScaleFigures, enough: float
) -> Scaled:
    found = figures(result, setting.goal)
    inside = 1.0 if found.attainment is None else found.attainment
    return Scaled(
        name=name,
        figures=found,
        gpu_hours_over_oracle=found.gpu_hours / reference.gpu_hours if reference.gpu_hours else 1.0,
        gpu_hours_over_bound=found.gpu_hours / reference.bound_gpu_hours if reference.bound_gpu_hours else 1.0,
        extra_replicas=found.mean_replicas - best.mean_replicas,
        is_cheap=found.gpu_hours <= reference.allowed_gpu_hours + 1e-9,
        keeps=inside >= enough,
        run=result,
    )
