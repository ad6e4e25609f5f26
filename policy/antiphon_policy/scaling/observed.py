"""What was really served late. Replays are right about the sizes as far as the latency model is right about the
workers; where it is not, or requests find the workers unevenly loaded, what was measured says so.

Of the requests that came since a pool last grew, its workers were ready and what had queued was gone (two starts, see
`needs`), those late by this pool's latency (first tokens for prompts, the others for answers) are counted: a pool whose
neighbour grew was flooded by what had queued there. If they are more than may be, more than the replay of the same
window at this size says (a burst explains itself, and is for `needs` to judge), and more than chance explains, one more
replica is needed than there are, or one in twenty of them. That takes effect, is counted anew, and so on. Shrinking
comes to the same size again after the usual patience, and if that was wrong, after a longer one.
"""

from __future__ import annotations

import math

from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling.records import PoolView, ScalingInputs
from antiphon_policy.scaling.replay import Replay
from antiphon_policy.scaling.work import Window

CHANCE = 2.0
"""Standard deviations of the number of late requests that are taken to be chance."""

STEP_SHARE = 0.05


def seen_late(pool: PoolView, window: Window, inputs: ScalingInputs) -> int:
    """Replicas needed by what was seen; 0: nothing is wrong, or nothing is known."""
    if pool.size <= 0 or pool.starting_ms:
        return 0
    begins_ms = inputs.now_ms - window.length_ms
    grown_ms = [one.added_ms for one in inputs.memory.pools if one.added_ms is not None]
    since_ms = max(grown_ms) + 2.0 * pool.start_ms - begins_ms if grown_ms else 0.0
    work = [one for one in window.work if one.at_ms >= since_ms and one.feasible]
    ttft, tpot = inputs.promise.ttft, inputs.promise.tpot
    wrong = False
    if pool.role is not WorkerRole.DECODE and ttft is not None:
        met = [(one.weight, one.met_ttft) for one in work]
        wrong = _too_many(met, 1.0 - ttft.percentile) and _too_many(met, _replayed(window, pool, inputs)[0])
    if pool.role is not WorkerRole.PREFILL and tpot is not None and not wrong:
        met = [(one.weight, one.met_tpot) for one in work]
        wrong = _too_many(met, 1.0 - tpot.percentile) and _too_many(met, _replayed(window, pool, inputs)[1])
    return pool.size + max(1, round(STEP_SHARE * pool.size)) if wrong else 0


def _replayed(window: Window, pool: PoolView, inputs: ScalingInputs) -> tuple[float, float]:
    """Shares that would be late at this size by the replay of the window as it came."""
    return Replay(window, pool, inputs.promise).late_share(pool.size)


def _too_many(met: list[tuple[float, bool | None]], share: float) -> bool:
    """Late, beside a share of them that may be."""
    known = [(weight, inside) for weight, inside in met if inside is not None]
    may_be = share * sum(weight for weight, _ in known)
    late = sum(weight for weight, inside in known if not inside)
    # A sample that stands for many is one piece of evidence.
    heaviest = max((weight for weight, _ in known), default=1.0)
    return late > may_be + CHANCE * math.sqrt(max(may_be, heaviest) * max(1.0, heaviest))
