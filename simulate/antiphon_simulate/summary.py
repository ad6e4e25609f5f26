"""What many runs say together: each policy's figures in the mean over the seeds, its goodput, and its share of the
bound's.

Goodput is taken seed by seed, from that seed's runs at all rates, and so is its ratio to the bound's; then the mean is
taken. A policy that keeps the SLA at no rate, or at all of them, has no goodput to divide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from antiphon_simulate.cells import CellResult, Plan, Variant
from antiphon_simulate.figures import Percentiles, RunFigures
from antiphon_simulate.goodput import Crossing, Goodput, Point, goodput

BOUND = "bound"
"""The policy that the others' goodput is divided by."""


@dataclass(frozen=True, slots=True)
class Means:
    """Means over the seeds of the figures of the same names (`figures.RunFigures`)."""

    prefill_hit_rate: float
    ideal_hit_rate: float
    hit_efficiency: float | None
    transfer_hit_rate: float | None
    inside_sla_share: float | None
    max_over_mean_busy: float | None
    max_over_mean_busy_loaded: float | None
    mean_utilisation: float
    completed_rps: float
    requests: float
    completed: float
    unfinished: float
    infeasible: float
    late_ttft: float
    late_tpot: float
    pulled_blocks: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles

    @classmethod
    def of(cls, runs: Sequence[RunFigures]) -> Means:
        values: dict[str, Any] = {}
        for field in fields(cls):
            found = [getattr(run, field.name) for run in runs]
            values[field.name] = (
                _percentiles(found) if field.name in ("ttft_ms", "tpot_ms") else mean(v for v in found if v is not None)
            )
        return cls(**values)


def mean(values: Iterable[float]) -> float | None:
    """None: there are none."""
    known = list(values)
    return math.fsum(known) / len(known) if known else None


def _percentiles(runs: Sequence[Percentiles]) -> Percentiles:
    return Percentiles(
        *(math.fsum(getattr(run, field.name) for run in runs) / len(runs) for field in fields(Percentiles))
    )


@dataclass(frozen=True, slots=True)
class AtRate:
    rate_scale: float
    offered_rps: float
    means: Means


@dataclass(frozen=True, slots=True)
class SeedGoodput:
    seed: int
    goodput: Goodput
    over_bound: float | None


@dataclass(frozen=True, slots=True)
class VariantSummary:
    variant: Variant
    at: Sequence[AtRate]
    """At the rates that were asked for, in their order."""
    goodput: Sequence[SeedGoodput]
    """Empty where it was not asked for."""
    runs: Sequence[CellResult]
    """All, by rate and seed; also those that the search for goodput made."""

    @property
    def goodput_rps(self) -> float | None:
        """The mean; None where a seed has none."""
        found = [one.goodput.rps for one in self.goodput if one.goodput.rps is not None]
        return mean(found) if len(found) == len(self.goodput) else None

    @property
    def goodput_over_bound(self) -> float | None:
        found = [one.over_bound for one in self.goodput if one.over_bound is not None]
        return mean(found) if len(found) == len(self.goodput) else None


@dataclass(frozen=True, slots=True)
class Summary:
    plan: Plan
    seeds: Sequence[int]
    rate_scales: Sequence[float]
    trace_rps: float
    variants: Sequence[VariantSummary]

    def best(self) -> dict[str, VariantSummary]:
        """By policy, the setting of the highest goodput, where there is any."""
        found: dict[str, VariantSummary] = {}
        for one in self.variants:
            policy, rps = one.variant.policy, one.goodput_rps
            if rps is not None and (policy not in found or rps > (found[policy].goodput_rps or 0.0)):
                found[policy] = one
        return found


def summarise(
    plan: Plan,
    variants: Sequence[Variant],
    seeds: Sequence[int],
    rate_scales: Sequence[float],
    results: Sequence[CellResult],
    *,
    trace_rps: float,
    with_goodput: bool,
) -> Summary:
    """`results`: of all of the variants at all of the rates with all of the seeds, and any more."""
    runs = {
        variant: sorted(
            (result for result in results if result.cell.variant == variant),
            key=lambda result: (result.cell.rate_scale, result.cell.seed),
        )
        for variant in variants
    }
    found: dict[tuple[str, int], Goodput] = {}
    if with_goodput:
        found = {(variant.label, seed): _of_seed(runs[variant], seed) for variant in variants for seed in seeds}
    return Summary(
        plan=plan,
        seeds=seeds,
        rate_scales=rate_scales,
        trace_rps=trace_rps,
        variants=[
            VariantSummary(
                variant=variant,
                at=[_at(runs[variant], scale) for scale in rate_scales],
                goodput=[
                    SeedGoodput(
                        seed, found[variant.label, seed], _ratio(found[variant.label, seed], found.get((BOUND, seed)))
                    )
                    for seed in seeds
                    if found
                ],
                runs=runs[variant],
            )
            for variant in variants
        ],
    )


def _of_seed(runs: Sequence[CellResult], seed: int) -> Goodput:
    return goodput(
        [Point(run.offered_rps, run.figures.inside_sla_share) for run in runs if run.cell.seed == seed],
    )


def _at(runs: Sequence[CellResult], rate_scale: float) -> AtRate:
    its = [run for run in runs if run.cell.rate_scale == rate_scale and run.cell.to_the_end]
    return AtRate(rate_scale, its[0].offered_rps, Means.of([run.figures for run in its]))


def _ratio(its: Goodput, bounds: Goodput | None) -> float | None:
    if bounds is None or its.crossing is not Crossing.FOUND or bounds.crossing is not Crossing.FOUND:
        return None
    return its.rps / bounds.rps if its.rps is not None and bounds.rps else None
