"""What each size of a pool would lose: late requests by slot of arrival, with that size throughout and the other pool
never in the way. Oracle and causal bound are found from these figures; what they find is run in the whole cluster then.

Prompts go through the cluster's own line on n workers, without anything else (`late_prompts`); answers through the
cluster with as many prefill workers as lose nothing. Followers of closed loops count at their recorded times here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from antiphon_simulate.autoscale.calls import Call, Load
from antiphon_simulate.autoscale.cluster import run
from antiphon_simulate.autoscale.policies.static import Static
from antiphon_simulate.autoscale.prompts import PromptLine
from antiphon_simulate.autoscale.records import Serving, Setting, Sizes
from antiphon_simulate.worker import HOP_MS


@dataclass(frozen=True, slots=True)
class Grid:
    """Time in slots in which sizes do not change; the last one may be shorter."""

    slot_ms: float
    span_ms: float

    @property
    def slots(self) -> int:
        return max(1, math.ceil(self.span_ms / self.slot_ms))

    @property
    def widths_ms(self) -> NDArray[np.float64]:
        widths = np.full(self.slots, self.slot_ms)
        widths[-1] = max(1.0, self.span_ms - (self.slots - 1) * self.slot_ms)
        return widths

    def slot(self, time_ms: float) -> int:
        return min(int(time_ms // self.slot_ms), self.slots - 1)


@dataclass(frozen=True, slots=True)
class Losses:
    """Of one pool."""

    sizes: NDArray[np.int64]
    """[sizes], growing by one."""
    late: NDArray[np.float64]
    """[sizes, slots]: feasible requests that came then and are late because of this pool."""

    @property
    def enough(self) -> int:
        """The smallest size that was looked at and loses the fewest."""
        return int(self.sizes[int(self.late.sum(axis=1).argmin())])

    def at(self, size: int) -> NDArray[np.float64]:
        found: NDArray[np.float64] = self.late[min(max(0, size - int(self.sizes[0])), len(self.sizes) - 1)]
        return found


def came(load: Load, grid: Grid) -> NDArray[np.float64]:
    """[slots]: feasible requests."""
    return _counted([call.arrival_ms for call in load.calls if call.feasible], grid)


def prefill_losses(load: Load, setting: Setting, grid: Grid) -> Losses:
    return _losses(
        setting.site.least.prefill,
        setting.site.most.prefill,
        load,
        grid,
        lambda size: [call.arrival_ms for call in late_prompts(load.calls, setting, size)],
    )


def decode_losses(load: Load, setting: Setting, grid: Grid, prefill: int) -> Losses:
    """`prefill`: as many workers as are never in the way."""
    setting = replace(setting, site=replace(setting.site, budget=None))  # what a size loses, may it be had or not

    def late(size: int) -> list[float]:
        sizes = Sizes(max(1, prefill), size)
        servings = run(load, setting, Static("losses", sizes), sizes).servings
        limit_ms = setting.goal.tpot_ms
        return [one.arrived_ms for one in servings if one.call.feasible and (one.tpot_ms or 0.0) > limit_ms]

    return _losses(setting.site.least.decode, setting.site.most.decode, load, grid, late)


def fresh_prefill_losses(load: Load, setting: Setting, grid: Grid, sizes: Losses) -> Losses:
    """At the same sizes, and no more than any sizes before and after a slot would lose in it: each slot begins with
    idle workers, and who still waits at its end is begun at once."""
    by_slot: list[list[Call]] = [[] for _ in range(grid.slots)]
    for call in load.calls:
        by_slot[grid.slot(call.arrival_ms)].append(call)
    late = np.zeros_like(sizes.late)
    for at, calls in enumerate(by_slot):
        for row, size in enumerate(sizes.sizes):
            if not sizes.late[row, at]:
                break  # with carried lines nobody is late there, so nobody is without
            end_ms = (at + 1) * grid.slot_ms
            late[row, at] = (
                len(late_prompts(calls, setting, int(size), until_ms=end_ms)) if size else sizes.late[row, at]
            )
    return Losses(sizes.sizes, np.minimum(late, sizes.late))


def late_prompts(calls: Sequence[Call], setting: Setting, workers: int, *, until_ms: float = math.inf) -> list[Call]:
    """Feasible ones whose first token comes too late, with so many prefill workers. From `until_ms` on nobody waits."""
    line = PromptLine(setting.timing)
    free = [0.0] * workers
    late = []
    coming, count = 0, len(calls)
    ordered = sorted(calls, key=lambda call: call.arrival_ms)
    while coming < count or len(line):
        now_ms = free[0] if len(line) else max(free[0], ordered[coming].arrival_ms)
        now_ms = min(now_ms, until_ms)
        while coming < count and ordered[coming].arrival_ms <= now_ms:
            call = ordered[coming]
            line.add(Serving(call, call.prompt_tokens, call.output_tokens, call.uncached_tokens, call.arrival_ms))
            coming += 1
        taken = line.take(now_ms)
        done_ms = now_ms + line.compute_ms(taken)
        if now_ms < until_ms:
            heapq.heapreplace(free, done_ms)
        for serving in taken:
            call = serving.call
            if call.feasible and done_ms + HOP_MS - call.arrival_ms > call.ttft_limit_ms:
                late.append(call)
    return late


def _losses(least: int, most: int, load: Load, grid: Grid, late_at: Callable[[int], Sequence[float]]) -> Losses:
    """From the smallest size on, up to the first that loses nobody."""
    sizes, late = [], []
    for size in range(least, most + 1):
        sizes.append(size)
        late.append(_counted(late_at(size), grid) if size else came(load, grid))
        if not late[-1].any():
            break
    return Losses(np.array(sizes), np.array(late))


def _counted(times_ms: Sequence[float], grid: Grid) -> NDArray[np.float64]:
    found = np.zeros(grid.slots)
    for time_ms in times_ms:
        found[grid.slot(time_ms)] += 1.0
    return found
