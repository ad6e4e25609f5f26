"""How evenly the workers of a pool were busy.

In each whole window (60 s) between the first and the last arrival (of a shorter run: the first window), `mean` is the
mean of the workers' busy times and `max` that of the busiest. `max_over_mean` is the sum of `max` over the windows
divided by the sum of `mean`: the mean of the windows' ratios, weighted by how busy they were, so that a window in
which next to nothing happened counts for next to nothing. `worst` is the largest ratio of any one window. 1 is
perfectly even; with one of N workers busy it is N. Pools are looked at apart, since a prefill worker and a decode
worker do not have the same work to share. A worker is busy while it runs steps, however small, so in a decode pool
this says who has had work and not how much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from antiphon_simulate.records import RunResult

LOADED = 0.7
"""Mean utilisation above which a window counts as loaded."""


@dataclass(frozen=True, slots=True)
class Evenness:
    """Over some windows."""

    windows: int
    max_over_mean: float
    worst: float


@dataclass(frozen=True, slots=True)
class PoolBusy:
    workers: int
    mean_utilisation: float
    """Share of the windows' time in which the workers were busy."""
    windows: Evenness | None
    """Over all windows in which anybody was busy; None: in none."""
    loaded: Evenness | None
    """Over the windows with a mean utilisation above `LOADED`; None: there are none."""
    mean_by_window: tuple[float, ...]
    """Share of each window in which the workers were busy, in the mean."""
    busiest_by_window: tuple[float, ...]
    """That of the busiest worker."""


def pools_busy(result: RunResult) -> Mapping[str, PoolBusy]:
    """By the pool's name: what stands before the number in its workers' ids (`prefill`, `decode`; `worker` where each
    does both)."""
    window_ms = result.window_ms
    first_ms = min((outcome.arrived_ms for outcome in result.outcomes), default=0.0)
    whole = max(1, int((first_ms + result.span_ms) // window_ms))
    # A run shorter than a window has the time to its end, if it ran on after the last arrival.
    length_ms = window_ms if first_ms + result.span_ms >= window_ms else min(window_ms, _end_ms(result)) or window_ms
    pools: defaultdict[str, list[Sequence[float]]] = defaultdict(list)
    for worker_id, times in result.busy_ms.items():
        pools[worker_id.rpartition("-")[0]].append(times)
    return {
        name: _pool([[times[at] if at < len(times) else 0.0 for times in pool] for at in range(whole)], length_ms)
        for name, pool in pools.items()
    }


def _pool(rows: Sequence[Sequence[float]], length_ms: float) -> PoolBusy:
    workers = len(rows[0])
    used = [row for row in rows if sum(row) > 0.0]
    loaded = [row for row in used if sum(row) > LOADED * workers * length_ms]
    return PoolBusy(
        workers=workers,
        mean_utilisation=sum(map(sum, rows)) / (workers * len(rows) * length_ms),
        windows=_evenness(used),
        loaded=_evenness(loaded),
        mean_by_window=tuple(sum(row) / (workers * length_ms) for row in rows),
        busiest_by_window=tuple(max(row) / length_ms for row in rows),
    )


def _evenness(rows: Sequence[Sequence[float]]) -> Evenness | None:
    if not rows:
        return None
    means = [sum(row) / len(row) for row in rows]
    return Evenness(
        windows=len(rows),
        max_over_mean=sum(map(max, rows)) / sum(means),
        worst=max(max(row) / mean for row, mean in zip(rows, means, strict=True)),
    )


def _end_ms(result: RunResult) -> float:
    return max((outcome.ended_ms for outcome in result.outcomes), default=0.0)
