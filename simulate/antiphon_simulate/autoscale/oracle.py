"""The oracle: a schedule of whole workers that sees the future, starts workers as late as the rest and keeps the goal.

It is found, not proved, to be the cheapest: dynamic programming over what each size would lose in each slot (`losses`,
`schedules`) gives the cheapest sizes for any number of late requests; the number is raised as long as the target is
kept, and then one worker less is tried in one stretch after the other. Every candidate is run in the same cluster as
the others, so what it keeps is kept. `least_worker_ms` bounds from below what any schedule could cost; the cheapest
lies between the two, and both are printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

import numpy as np

from antiphon_simulate.autoscale.calls import Load
from antiphon_simulate.autoscale.causal import best_causal
from antiphon_simulate.autoscale.cluster import StarvedError, run
from antiphon_simulate.autoscale.figures import attainment, gpu_hours
from antiphon_simulate.autoscale.losses import (
    Grid,
    Losses,
    came,
    decode_losses,
    fresh_prefill_losses,
    prefill_losses,
)
from antiphon_simulate.autoscale.oracle_bound import least_worker_ms
from antiphon_simulate.autoscale.policies.static import Scheduled, Static
from antiphon_simulate.autoscale.records import ScaleRun, Setting, Sizes
from antiphon_simulate.autoscale.schedules import with_losses
from antiphon_simulate.autoscale.work import decode_demands, prefill_demands

_FINE_MS, _FINE_SPAN_MS = 10_000.0, 2 * 3_600_000.0
_COARSE_MS = 30_000.0
_LOWERING_SHARE = 0.5
"""Of the runs, those that are kept for trying one worker less."""
_EDGE_SLOTS = (1, 3)

COST_OVER_ORACLE = 1.10
REPLICAS_OVER_ORACLE = 1.0


def slot_ms_for(span_ms: float) -> float:
    return _FINE_MS if span_ms <= _FINE_SPAN_MS else _COARSE_MS


def allowed_gpu_hours(oracle_gpu_hours: float, span_ms: float) -> float:
    """What is asked of a law: the larger of a tenth and one replica above the oracle."""
    return max(COST_OVER_ORACLE * oracle_gpu_hours, oracle_gpu_hours + REPLICAS_OVER_ORACLE * span_ms / 3_600_000.0)


@dataclass(frozen=True, slots=True)
class Oracle:
    schedule: tuple[Sizes, ...]
    slot_ms: float
    run: ScaleRun
    gpu_hours: float
    reaches: bool
    """False: not even the largest pools keep the goal; then it is the run of those."""

    @property
    def begin(self) -> Sizes:
        return self.schedule[0]


class OracleSearch:
    """Looks for the oracle of one load. `runs`: so many simulations at most, besides those that say what sizes lose."""

    def __init__(self, load: Load, setting: Setting, *, runs: int, seed: int = 0) -> None:
        self._load = load
        # Whoever sees the future is not asked to survive failures that nobody can see.
        self._setting = replace(setting, site=replace(setting.site, mean_life_h=0.0))
        self._seed = seed
        self._left = runs
        self._best: tuple[float, tuple[Sizes, ...], ScaleRun] | None = None
        self.grid = Grid(slot_ms_for(load.span_ms), load.span_ms)

    @cached_property
    def losses(self) -> tuple[Losses, Losses]:
        prefill = prefill_losses(self._load, self._setting, self.grid)
        return prefill, decode_losses(self._load, self._setting, self.grid, prefill.enough)

    @cached_property
    def _may_be_late(self) -> float:
        feasible = sum(call.feasible for call in self._load.calls)
        return math.floor((1.0 - self._setting.goal.target) * feasible + 1e-9)

    def find(self) -> Oracle:
        self._try((self.peak(),) * self.grid.slots)
        self._raise_losses(reserve=round(_LOWERING_SHARE * self._left))
        if self._best is None:
            schedule = (self._setting.site.most,) * self.grid.slots
            result = self._simulate(schedule)
            return Oracle(schedule, self.grid.slot_ms, result, gpu_hours(result), reaches=False)
        self._lower()
        hours, schedule, result = self._best
        return Oracle(schedule, self.grid.slot_ms, result, hours, reaches=True)

    def peak(self) -> Sizes:
        """The smallest pools that keep the goal without ever changing; the largest, where none does."""
        pairs = product(*([max(1, int(size)) for size in losses.sizes] for losses in self.losses))
        guesses = sorted({(pair, self._lost_at(Sizes(*pair))) for pair in pairs}, key=lambda one: (sum(one[0]), one[1]))
        for pair, late in guesses:
            if late <= 1.5 * self._may_be_late + 2.0:
                sizes = Sizes(*pair)
                if self._keeps(run(self._load, self._setting, Static("peak", sizes), sizes)):
                    return sizes
        return self._setting.site.most

    def causal_attainment(self, oracle_gpu_hours: float) -> float:
        """See `causal`."""
        prefill, decode = self.losses
        return best_causal(
            (fresh_prefill_losses(self._load, self._setting, self.grid, prefill), decode),
            self.grid,
            came(self._load, self.grid),
            target=self._setting.goal.target,
            start_ms=self._setting.site.shortest_start_ms,
            allowed_ms=3_600_000.0 * allowed_gpu_hours(oracle_gpu_hours, self._load.span_ms),
        )

    def bound_gpu_hours(self) -> float:
        """No schedule keeps the goal for less."""
        site, setting = self._setting.site, self._setting
        # A worker may come from the other pool for less than a start.
        start_ms = min(site.shortest_start_ms, site.switch_ms) if site.may_switch else site.shortest_start_ms
        total_ms = sum(
            least_worker_ms(
                demands,
                span_ms=self._load.span_ms,
                slot_ms=self.grid.slot_ms,
                target=setting.goal.target,
                least=least,
                most=most,
                start_ms=start_ms,
            )
            for demands, least, most in (
                (prefill_demands(self._load.calls, setting), site.least.prefill, site.most.prefill),
                (decode_demands(self._load.calls, setting), site.least.decode, site.most.decode),
            )
        )
        return total_ms / 3_600_000.0

    # -- candidates

    def _raise_losses(self, *, reserve: int) -> None:
        """As many losses as still keep the target, each with its cheapest schedule. Workers that are ready before their
        slot and lines that are carried over make real losses fewer or more than those that were added up."""
        low, high = 0.0, 2.0 * self._may_be_late + 1.0
        allowed = float(self._may_be_late)
        tried: set[tuple[Sizes, ...]] = set()
        while self._left > reserve and (high - low > 0.02 * self._may_be_late + 0.5):
            schedule = self._cheapest(allowed)
            if schedule in tried:
                kept = self._best is not None and schedule == self._best[1]
            else:
                tried.add(schedule)
                result = self._try(schedule)
                kept = result is not None and self._keeps(result)
            low, high = (allowed, high) if kept else (low, allowed)
            allowed = (low + high) / 2.0

    def _cheapest(self, allowed: float) -> tuple[Sizes, ...]:
        lead_ms = self._setting.site.longest_start_ms
        pools = with_losses(self.losses, self.grid, allowed=allowed, start_ms=lead_ms)
        # Nobody can order before the beginning: what is wanted before the first order is ready is there at once.
        first = math.ceil(lead_ms / self.grid.slot_ms)
        found = []
        for sizes in pools:
            sizes = sizes.copy()
            sizes[: first + 1] = sizes[: first + 1].max()
            found.append(np.maximum(sizes, 0))
        return tuple(Sizes(int(prefill), int(decode)) for prefill, decode in zip(*found, strict=True))

    def _lower(self) -> None:
        """One worker less in one stretch of equal size, or at its edge, after the other: where it saves most for what
        it is taken to lose."""
        assert self._best is not None
        tried: set[tuple[Sizes, ...]] = set()
        while self._left > 0:
            candidates = [one for one in self._lowered(self._best[1]) if one not in tried]
            if not candidates:
                return
            tried.add(candidates[0])
            self._try(candidates[0])

    def _lowered(self, schedule: tuple[Sizes, ...]) -> list[tuple[Sizes, ...]]:
        found = []
        slack = self._may_be_late - self._lost_in(self._best[2]) if self._best else 0.0
        for pool, losses in zip(("prefill", "decode"), self.losses, strict=True):
            least = getattr(self._setting.site.least, pool)
            for begin, end in _stretches(schedule, pool):
                size = getattr(schedule[begin], pool)
                if size <= least or size - 1 < losses.sizes[0]:
                    continue
                late = float((losses.at(size - 1) - losses.at(size))[begin:end].sum())
                if late <= 3.0 * slack + 1.0:
                    lowered = tuple(
                        replace(sizes, **{pool: size - 1}) if begin <= at < end else sizes
                        for at, sizes in enumerate(schedule)
                    )
                    found.append(((end - begin) / (late + 1.0), lowered))
        found.sort(key=lambda one: -one[0])
        return [lowered for _, lowered in found]

    def _try(self, schedule: tuple[Sizes, ...]) -> ScaleRun | None:
        """Kept if it is the cheapest so far that keeps the goal. None: it leaves requests without workers."""
        self._left -= 1
        try:
            result = self._simulate(schedule)
        except StarvedError:
            return None
        hours = gpu_hours(result)
        if self._keeps(result) and (self._best is None or hours < self._best[0]):
            self._best = (hours, schedule, result)
        return result

    def _simulate(self, schedule: tuple[Sizes, ...]) -> ScaleRun:
        return run_schedule(self._load, self._setting, schedule, self.grid.slot_ms, seed=self._seed)

    def _keeps(self, result: ScaleRun) -> bool:
        return attainment(result, self._setting.goal) >= self._setting.goal.target

    def _lost_at(self, sizes: Sizes) -> float:
        return sum(
            float(losses.at(size).sum())
            for losses, size in zip(self.losses, (sizes.prefill, sizes.decode), strict=True)
        )

    def _lost_in(self, result: ScaleRun) -> float:
        goal = self._setting.goal
        return sum(serving.call.feasible and not serving.is_inside(goal) for serving in result.servings)


def run_schedule(load: Load, setting: Setting, schedule: Sequence[Sizes], slot_ms: float, *, seed: int = 0) -> ScaleRun:
    """The oracle's: sizes that are to be ready, each worker ordered as late as its start allows at its longest."""
    site = replace(setting.site, mean_life_h=0.0)
    scaler = Scheduled("oracle", schedule, slot_ms=slot_ms, lead_ms=site.longest_start_ms)
    return run(load, replace(setting, site=site), scaler, schedule[0], seed=seed)


def _stretches(schedule: Sequence[Sizes], pool: str) -> Iterator[tuple[int, int]]:
    """Where the pool's size does not change, and a slot or three at either end of those."""
    edges = [0]
    edges += [at for at in range(1, len(schedule)) if getattr(schedule[at], pool) != getattr(schedule[at - 1], pool)]
    edges.append(len(schedule))
    for begin, end in pairwise(edges):
        yield begin, end
        for slots in _EDGE_SLOTS:
            if slots < end - begin:
                if begin:
                    yield begin, begin + slots
                yield end - slots, end
