"""The cheapest sizes by slot, where a late request has a price: dynamic programming over what each size loses.

    min  sum over slots k of  size_k * width_k + start * max(0, size_k - size_(k-1)) + price * late(size_k, k)

Both pools have the same price, so a late request is allowed where it saves most, whichever pool that is in. The price
is the lowest at which no more are late than may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon_simulate.autoscale.losses import Grid, Losses

_PRICES = 30


def cheapest(losses: Losses, grid: Grid, *, price_ms: float, start_ms: float) -> NDArray[np.int64]:
    """[slots]: sizes. `price_ms`: worker-milliseconds that a late request is worth; `start_ms`: what a start costs."""
    sizes = losses.sizes.astype(np.float64)
    here = sizes[:, None] * grid.widths_ms[None, :] + price_ms * losses.late
    grows = start_ms * np.maximum(0.0, sizes[None, :] - sizes[:, None])
    costs = here[:, 0]
    came_from = np.zeros((grid.slots, len(sizes)), dtype=np.int64)
    for at in range(1, grid.slots):
        through = costs[:, None] + grows
        came_from[at] = through.argmin(axis=0)
        costs = through[came_from[at], np.arange(len(sizes))] + here[:, at]
    place = int(costs.argmin())
    found = np.empty(grid.slots, dtype=np.int64)
    for at in range(grid.slots - 1, -1, -1):
        found[at] = losses.sizes[place]
        place = int(came_from[at, place])
    return found


def with_losses(
    pools: Sequence[Losses], grid: Grid, *, allowed: float, start_ms: float
) -> tuple[NDArray[np.int64], ...]:
    """The cheapest sizes of each pool with which about `allowed` requests in all are late, and not more (unless even
    the largest sizes lose more)."""
    low, high = 1.0, 10.0 * grid.span_ms * max(int(losses.sizes[-1]) + 1 for losses in pools)
    best = tuple(cheapest(losses, grid, price_ms=high, start_ms=start_ms) for losses in pools)
    for _ in range(_PRICES):
        price_ms = math.sqrt(low * high)
        found = tuple(cheapest(losses, grid, price_ms=price_ms, start_ms=start_ms) for losses in pools)
        if sum(lost(losses, sizes) for losses, sizes in zip(pools, found, strict=True)) <= allowed:
            best, high = found, price_ms
        else:
            low = price_ms
        if high / low < 1.01:
            break
    return best


def lost(losses: Losses, sizes: NDArray[np.int64]) -> float:
    """Late requests with these sizes, as far as each slot stands for itself."""
    return float(losses.late[sizes - losses.sizes[0], np.arange(len(sizes))].sum())
