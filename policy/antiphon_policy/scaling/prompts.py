"""The first half of a replay: prompts that n workers compute, fed by one line in the gateway's order.

A worker computes one prompt at a time (its chunks one after the other). Whoever is free takes, of those that wait, the
one whose first token is due first; one that is too late already goes after all that are not, as at the gateway. Prompts
that would share a step are counted one after the other, so very short ones look a little dearer than they are.

A sample that stands for several requests is replayed as so many: at times drawn evenly up to that of the next sample,
with lengths drawn from the samples near it. Only so is it n workers that share one line. Above `MOST_REPLAYED` requests
(or `MOST_COPIES` of a sample) the rest of the weight, w in the mean, makes the replay one of a slice of the fleet: 1/w
of the requests on m workers, each so much faster or slower that their sum is n/w workers. m does not depend on n. A
slice pools less than the fleet, so this is on the safe side.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon_policy.scaling.work import Window, Work

MOST_REPLAYED = 8000
MOST_COPIES = 10
"""Of one sample."""

_NEAR = 50
"""Lengths are drawn from so many samples to either side."""


@dataclass(frozen=True, slots=True)
class Line:
    """Prompts by arrival, one list for each attribute: replays read them many thousand times."""

    at_ms: Sequence[float]
    due_ms: Sequence[float]
    service_ms: Sequence[float]
    held_ms: Sequence[float]
    """How long each keeps a worker busy: with its weight."""
    counted: Sequence[float]
    """What counts as late if it is: its weight, or 0 where nobody could serve it in time."""
    mean_weight: float
    offered_workers: float
    """How many workers they keep busy, in the mean over the time."""


@dataclass(frozen=True, slots=True)
class PromptRun:
    """What came of it."""

    late: float
    """Weight of the feasible requests whose first token was late; of those so far where it was cut short."""
    starts_ms: Sequence[float]
    """When each was begun; empty where it was cut short or nobody asked."""
    busy_ms: Sequence[float]
    """How long each held its worker."""
    servers: int


def line_of(window: Window) -> Line:
    work = window.work
    scale = min(1.0, MOST_REPLAYED / window.weight) if work else 1.0
    copies = [copies_of(one, scale) for one in work]
    whole: Sequence[tuple[float, Work, float]]
    if max(copies, default=1) == 1:
        whole = [(one.at_ms, one, one.weight) for one in work]
    else:
        whole = _multiplied(work, copies, window.length_ms)
    held_ms = [one.service_ms * weight for _, one, weight in whole]
    return Line(
        [at_ms for at_ms, _, _ in whole],
        [at_ms + one.limit_ms for at_ms, one, _ in whole],
        [one.service_ms for _, one, _ in whole],
        held_ms,
        [weight if one.feasible else 0.0 for _, one, weight in whole],
        window.weight / len(whole) if whole else 1.0,
        sum(held_ms) / window.length_ms,
    )


def copies_of(one: Work, scale: float) -> int:
    """As how many requests a sample is replayed."""
    return max(1, min(MOST_COPIES, math.ceil(one.weight * scale - 1e-9)))


def _multiplied(work: Sequence[Work], copies: Sequence[int], length_ms: float) -> list[tuple[float, Work, float]]:
    # Drawn anew from the same beginning for each window, so that a decision is a function of its inputs.
    draw = random.Random(0).random
    whole = []
    last = len(work) - 1
    for at, (one, count) in enumerate(zip(work, copies, strict=True)):
        weight = one.weight / count
        whole.append((one.at_ms, one, weight))
        gap_ms = (work[at + 1].at_ms if at < last else length_ms) - one.at_ms
        first = max(0, min(at - _NEAR, last - 2 * _NEAR))
        among = min(2 * _NEAR, last - first) + 1
        for _ in range(count - 1):
            whole.append((one.at_ms + gap_ms * draw(), work[first + int(among * draw())], weight))
    whole.sort(key=lambda each: each[0])
    return whole


def run_prompts(
    line: Line, workers: int, *, most_late: float = float("inf"), dearer: float = 1.0, starts: bool = False
) -> PromptRun:
    """`most_late`: cut short once more weight than that is late. `dearer`: service times count so many times."""
    servers, pace = _slice(line, workers)
    pace *= dearer
    services = line.service_ms if dearer == 1.0 else [one * dearer for one in line.service_ms]
    held = line.held_ms if pace == 1.0 else [one * pace for one in line.held_ms]
    due, counted = line.due_ms, line.counted
    begun = [0.0] * len(held) if starts else []
    free = [0.0] * servers
    waiting: list[tuple[float, int]] = []
    too_late: deque[int] = deque()
    late, push, pop, replace = 0.0, heapq.heappush, heapq.heappop, heapq.heapreplace
    for coming, now_ms in enumerate((*line.at_ms, float("inf"))):
        # Until then, whoever becomes free takes what waits.
        while (waiting or too_late) and (free_ms := free[0]) <= now_ms:
            while waiting:
                due_ms, at = pop(waiting)
                if free_ms + services[at] <= due_ms:
                    break
                too_late.append(at)
                late += counted[at]
            else:
                if late > most_late:
                    return PromptRun(late, (), (), servers)
                at = too_late.popleft()
            if starts:
                begun[at] = free_ms
            replace(free, free_ms + held[at])
        if coming == len(held):
            break
        if free[0] <= now_ms:
            # Nobody waits: most prompts go this way.
            if now_ms + services[coming] > due[coming]:
                late += counted[coming]
            if starts:
                begun[coming] = now_ms
            replace(free, now_ms + held[coming])
        else:
            push(waiting, (due[coming], coming))
        if late > most_late:
            break
    if late > most_late:
        return PromptRun(late, (), (), servers)
    return PromptRun(late, begun, held if starts else (), servers)


def _slice(line: Line, workers: int) -> tuple[int, float]:
    """(m, what a service time of weight 1 counts for)."""
    if line.mean_weight <= 1.0 + 1e-9:
        return workers, 1.0
    servers = max(1, round(line.offered_workers / line.mean_weight))
    return servers, servers / workers
