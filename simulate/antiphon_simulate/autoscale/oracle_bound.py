"""A cost below which no schedule of whole workers can keep the goal, whatever it knows: the floor of the oracle.

Each pool is looked at alone, on a grid of slots in which its size does not change. What is given away makes it a bound:

- work is a fluid: a request can be computed by all workers at once, in any order, at any time between its arrival and
  the latest time at which its last millisecond can be done;
- a request's work is the least it can be (`work.py`); infeasible requests cost nothing; those that are left out, up to
  1 - target of them, cost nothing either, and are the most expensive ones of their slot;
- work that is carried over into a slot is no more than what is not due yet, and is rounded down.

    min over sizes n and requests served   sum n_k * slot + start * max(0, n_k - n_(k-1))
    with                                   served >= target * feasible

The last line gets a price: with `price` for each served request the rest is a walk through (size, carried work), which
dynamic programming solves exactly. For every price >= 0 the value is a lower bound (weak duality), and the best of some
prices is returned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon_simulate.autoscale.work import Demand

_LEVELS = 32
"""Of carried work."""
_PRICES = 16


@dataclass(frozen=True, slots=True)
class _Slots:
    """The demand by slots: for each slot, work of its requests from the cheapest on, summed up, and the highest work
    that can be carried out of it."""

    sums: list[NDArray[np.float64]]
    free: list[int]
    """Requests that need nothing."""
    carried: NDArray[np.float64]


def least_worker_ms(
    demands: Sequence[Demand], *, span_ms: float, slot_ms: float, target: float, least: int, most: int, start_ms: float
) -> float:
    """Worker-milliseconds of one pool in the span. `demands`: of the feasible requests. `start_ms`: the least that a
    start costs; 0: nothing."""
    slots = max(1, math.ceil(span_ms / slot_ms))
    if not demands:
        return least * span_ms
    by_slot = _by_slot(demands, slots, slot_ms, span_ms)
    wanted = target * len(demands)
    widths = np.full(slots, slot_ms)
    widths[-1] = span_ms - (slots - 1) * slot_ms
    most = max(least, min(most, _useful(by_slot, widths)))
    # A price at which leaving a tenth of one out is dearer than all workers for the whole time is high enough.
    low, high = 0.0, 10.0 * most * span_ms
    best = 0.0
    for _ in range(_PRICES):
        price = math.sqrt(max(low, 1.0) * high)
        value, served = _walk(by_slot, widths, price, least, most, start_ms)
        best = max(best, value + price * wanted)
        if served < wanted:
            low = price
        else:
            high = price
    return best


def _useful(by_slot: _Slots, widths: NDArray[np.float64]) -> int:
    """Workers beyond which nothing more can be done in any slot: all that is there is."""
    there = np.array([sums[-1] for sums in by_slot.sums])
    there[1:] += by_slot.carried[:-1]
    return math.ceil(float((there / widths).max()))


def _by_slot(demands: Sequence[Demand], slots: int, slot_ms: float, span_ms: float) -> _Slots:
    works: list[list[float]] = [[] for _ in range(slots)]
    free = [0] * slots
    carried = np.zeros(slots + 1)
    for demand in demands:
        first = min(int(demand.from_ms // slot_ms), slots - 1)
        # It may be open at the ends of the slots before the one in which it is due; who is due later, at that of all.
        due = slots if demand.until_ms > span_ms else max(first, math.ceil(demand.until_ms / slot_ms) - 1)
        if demand.work_ms > 0.0:
            works[first].append(demand.work_ms)
        else:
            free[first] += 1
        carried[first] += demand.work_ms
        carried[due] -= demand.work_ms
    sums = [np.concatenate(([0.0], np.cumsum(sorted(one)))) for one in works]
    return _Slots(sums, free, np.maximum(0.0, np.cumsum(carried)[:slots]))


def _walk(
    by_slot: _Slots, widths: NDArray[np.float64], price: float, least: int, most: int, start_ms: float
) -> tuple[float, float]:
    """(least cost - price * served, how many were served on the way)."""
    sizes = np.arange(least, most + 1, dtype=np.float64)
    quantum = max(1e-9, float(by_slot.carried.max()) / _LEVELS)
    levels = np.arange(_LEVELS + 1) * quantum
    # Costs and served requests of the cheapest way to (size, carried work); a run begins with any size.
    costs = np.full((len(sizes), len(levels)), np.inf)
    costs[:, 0] = 0.0
    served = np.zeros_like(costs)
    grows = start_ms * np.maximum(0.0, sizes[None, :] - sizes[:, None])
    for at, sums in enumerate(by_slot.sums):
        if at:
            through = costs[:, None, :] + grows[:, :, None]
            which = through.argmin(axis=0)
            costs = np.take_along_axis(through, which[None], axis=0)[0]
            served = np.take_along_axis(served, which, axis=0)
        capacity = sizes * widths[at]
        # Stands for all carried work from one level to the next, so its upper end counts.
        out = np.minimum(levels + quantum, by_slot.carried[at])
        room = capacity[:, None, None] - levels[None, :, None] + out[None, None, :]
        count = by_slot.free[at] + np.interp(np.maximum(room, 0.0), sums, np.arange(len(sums)))
        step = costs[:, :, None] + capacity[:, None, None] - price * count
        step[room < 0.0] = np.inf
        which = step.argmin(axis=1)
        costs = np.take_along_axis(step, which[:, None], axis=1)[:, 0]
        served = np.take_along_axis(served, which, axis=1) + np.take_along_axis(count, which[:, None], axis=1)[:, 0]
    place = np.unravel_index(int(costs.argmin()), costs.shape)
    return float(costs[place]), float(served[place])
