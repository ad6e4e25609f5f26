"""How far arrivals jump faster than a worker can start: by how many workers the work that comes grows from one start's
time to the next, beyond what chance explains.

    jump = largest over t of  work(t, t + start) - work(t - start, t) - 3 * sqrt(sum of squared works of both)

with works in workers (milliseconds of work over a start). A load jumps where that is a whole worker or more: then even
who orders with the first of them is a start too late for a worker's worth of requests.
"""

from __future__ import annotations

import numpy as np

from antiphon_simulate.autoscale.calls import Load
from antiphon_simulate.autoscale.capacity import profile
from antiphon_simulate.autoscale.records import Setting

_CHANCE = 3.0
_LOOKS = 6
"""In a start."""


def jump_workers(load: Load, setting: Setting) -> float:
    start_ms = setting.site.start_ms
    if start_ms <= 0.0 or not load.calls:
        return 0.0
    batch = profile(load.calls, setting).batch
    look_ms = start_ms / _LOOKS
    looks = int(load.span_ms // look_ms) + 1
    work, squares = np.zeros(looks), np.zeros(looks)
    for call in load.calls:
        share = (call.prefill_ms + call.output_tokens * setting.goal.tpot_ms / batch) / start_ms
        at = min(int(call.arrival_ms // look_ms), looks - 1)
        work[at] += share
        squares[at] += share * share
    if looks < 2 * _LOOKS:
        return 0.0
    works, chances = (np.convolve(one, np.ones(_LOOKS), mode="valid") for one in (work, squares))
    grown = works[_LOOKS:] - works[:-_LOOKS] - _CHANCE * np.sqrt(chances[_LOOKS:] + chances[:-_LOOKS])
    return max(0.0, float(grown.max()))
