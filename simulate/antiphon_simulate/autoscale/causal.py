"""How many requests the best law could serve inside the goal that does not see the future, at the cost that is asked.

A worker serves one start after it was ordered, so the size of a pool in a slot is a function of what was known one
start before. Looked at is every such function of what the load needed then and another start earlier (in whole
workers), and, since workers may go at once, of whether less is needed now. Which function is chosen knowing the whole
load: the one with which the fewest are late at that cost. It is given more than any law has: it knows the future's
statistics though not its order, the shortest start counts, starts cost nothing, prompts are not carried from one slot
into the next (`losses.fresh_prefill_losses`), and exact needs are known with the slot's end. What answers lose is taken
from the cluster with that decode pool throughout.

    min over functions f of both pools   sum over slots of  late(f(state_k), k)
    with                                 sum over slots of  f(state_k) * width_k  <=  allowed worker-milliseconds

With a price for cost the minimum falls apart into one for each state, and every price gives a lower bound on the late
ones (weak duality); the best price is taken. A pool that was kept small before a jump cannot be told from the same pool
without a jump to come, so it must be large at both times or at neither: that is what it bounds. A law that uses more
than these two looks back (a period that it has learnt, a trend over ten minutes) can be better on loads that can be
foreseen so; on loads whose jumps come unannounced there is nothing more to know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon_simulate.autoscale.losses import Grid, Losses

_PRICES = 400
_SLOT_SHARE = 0.25
"""What is ready in the last quarter of a slot may have been ordered knowing more; that is left out."""


def best_causal(
    pools: Sequence[Losses],
    grid: Grid,
    came: NDArray[np.float64],
    *,
    target: float,
    start_ms: float,
    allowed_ms: float,
) -> float:
    """Share of the feasible requests inside. `came`: [slots], feasible ones; `start_ms`: the shortest start;
    `allowed_ms`: worker-milliseconds of both pools together."""
    feasible = float(came.sum())
    if feasible <= 0.0:
        return 1.0
    groups = [group for losses in pools for group in _by_state(losses, grid, came, target, start_ms)]
    span_ms = float(grid.widths_ms.sum())
    # From prices at which nobody is worth a worker to those at which everybody is worth all of them.
    prices = np.concatenate(([0.0], np.geomspace(1e-3, 1e6, _PRICES) / span_ms))
    least = np.zeros(len(prices))
    for sizes, width_ms, late in groups:
        least += (prices[:, None] * sizes[None, :] * width_ms + late[None, :]).min(axis=1)
    late_ones = float((least - prices * allowed_ms).max())
    return 1.0 - max(0.0, late_ones) / feasible


def needs(losses: Losses, came: NDArray[np.float64], target: float) -> NDArray[np.int64]:
    """[slots]: the smallest size that loses no more of a slot's requests than may be; the largest, where none does."""
    good = losses.late <= (1.0 - target) * came[None, :] + 1e-9
    good[-1] = True
    found: NDArray[np.int64] = losses.sizes[good.argmax(axis=0)]
    return found


def _by_state(
    losses: Losses, grid: Grid, came: NDArray[np.float64], target: float, start_ms: float
) -> list[tuple[NDArray[np.float64], float, NDArray[np.float64]]]:
    """For each state: (sizes, time spent in it, late requests at each size)."""
    needed = needs(losses, came, target)
    back = max(1, math.floor(start_ms / grid.slot_ms + _SLOT_SHARE))
    slots: dict[tuple[int, int, bool], list[int]] = {}
    for at in range(grid.slots):
        then = int(needed[at - back]) if at >= back else -1
        earlier = int(needed[at - 2 * back]) if at >= 2 * back else -1
        falls = at >= back and bool(needed[at - 1] < needed[at - back])
        slots.setdefault((then, earlier, falls), []).append(at)
    widths_ms, sizes = grid.widths_ms, losses.sizes.astype(np.float64)
    return [(sizes, float(widths_ms[at].sum()), losses.late[:, at].sum(axis=1)) for at in slots.values()]
