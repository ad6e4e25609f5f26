"""Samples as replays see them: what each request costs and what it was promised, and which could be kept at all.

A request is *infeasible* if an idle worker with a perfect cache could not have served it in time: `prefill_ms` of what
such a cache would leave plus the hop, against its TTFT limit; a step that decodes it alone, against the TPOT limit. No
number of workers helps it. It is counted apart, and replayed all the same: it takes its share of the workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import msgspec

from antiphon_policy.latency import StepModel
from antiphon_policy.scaling.records import PoolView, Promise, RequestSample

HOP_MS = 2.0
"""From the client through the gateway to a worker, and back."""

BLOCKS = 10
"""A window is looked at in so many parts where the rate inside it counts."""

CHANGED = 4.0
"""Standard deviations between the rates before and after a change."""

_CHANGES = 60
"""Times at which a change is looked for."""

BUSY_SHARE = 0.5
LEAST_PARTS = 3
"""Of a window at another rate, those parts count that are at least half as busy, and the busiest in any case."""

MOST_TILED = 500
"""A short window is repeated up to so many requests, so that a rate that is foreseen can build up its queues."""


class Work(msgspec.Struct, frozen=True, gc=False):
    """One request."""

    at_ms: float
    weight: float
    uncached_tokens: int
    service_ms: float
    """Of its prompt, on a worker that does nothing else."""
    limit_ms: float
    """Of its first token, less the hop."""
    tokens: int
    """To decode: those after the first."""
    context_tokens: float
    """In the mean over its answer."""
    room_tokens: int
    """KV that it needs in the end."""
    feasible: bool = True
    met_ttft: bool | None = None
    """Whether its first token came in time; None: not known."""
    met_tpot: bool | None = None


@dataclass(frozen=True)
class Window:
    """The requests of a time, oldest first, from 0 ms on."""

    work: tuple[Work, ...]
    length_ms: float

    @cached_property
    def weight(self) -> float:
        return sum(one.weight for one in self.work)

    @cached_property
    def changes_ms(self) -> tuple[float, ...]:
        """When its rate changed (`changes_of`), the first first."""
        return changes_of(self.work, self.length_ms)

    @property
    def rps(self) -> float:
        return 1000.0 * self.weight / self.length_ms

    @property
    def attainment(self) -> float | None:
        """Of the feasible requests of which it is known, those that were served inside the limits."""
        known = [one for one in self.work if one.feasible and (one.met_ttft, one.met_tpot) != (None, None)]
        whole = sum(one.weight for one in known)
        met = sum(one.weight for one in known if one.met_ttft is not False and one.met_tpot is not False)
        return met / whole if whole else None

    @property
    def infeasible_share(self) -> float:
        whole = self.weight
        return sum(one.weight for one in self.work if not one.feasible) / whole if whole else 0.0


def window_of(
    samples: Sequence[RequestSample], now_ms: float, promise: Promise, prompts_on: PoolView, answers_on: PoolView
) -> Window:
    """The samples of the promise's window, priced by the pools' step models."""
    length_ms = promise.window_s * 1000.0
    begins_ms = now_ms - length_ms
    # Lengths repeat, and pricing is the dear part.
    prompt_ms: dict[tuple[int, int], float] = {}
    limits_ms: dict[int, float] = {}
    ttft_ms, tpot_ms = promise.ttft, promise.tpot.limit_ms if promise.tpot else None
    work = []
    for sample in sorted(samples, key=_came):
        at_ms = sample.at_ms
        if not begins_ms <= at_ms <= now_ms or sample.weight <= 0.0:
            continue
        uncached, prompt, output = sample.uncached_tokens, sample.prompt_tokens, sample.output_tokens
        key = (uncached, prompt)
        service_ms = prompt_ms.get(key)
        if service_ms is None:
            service_ms = prompt_ms[key] = _prefill_ms(prompts_on, sample, uncached)
            if uncached not in limits_ms:
                limits_ms[uncached] = ttft_limit_ms(promise, prompts_on, uncached)
        limit_ms = limits_ms[uncached]
        work.append(
            Work(
                at_ms - begins_ms,
                sample.weight,
                uncached,
                service_ms,
                limit_ms - HOP_MS,
                max(0, output - 1),
                prompt + output / 2.0,
                prompt + output,
                is_feasible(sample, promise, prompts_on, answers_on, service_ms),
                None if ttft_ms is None or sample.ttft_ms is None else sample.ttft_ms <= limit_ms,
                None if tpot_ms is None or sample.tpot_ms is None else sample.tpot_ms <= tpot_ms,
            )
        )
    return Window(tuple(work), length_ms)


def _came(sample: RequestSample) -> float:
    return sample.at_ms


def ttft_limit_ms(promise: Promise, prompts_on: PoolView, uncached_tokens: int) -> float:
    """Where nothing is promised, nobody is to wait for longer than a new worker takes to start."""
    if promise.ttft is None:
        return prompts_on.start_ms + prompts_on.step.prefill_ms(
            new_tokens=uncached_tokens, chunk_tokens=prompts_on.chunk_tokens
        )
    return promise.ttft.limit_ms(uncached_tokens)


def is_feasible(
    sample: RequestSample,
    promise: Promise,
    prompts_on: PoolView,
    answers_on: PoolView,
    service_ms: float | None = None,
) -> bool:
    """Whether an idle worker with a perfect cache could have served it in time. `service_ms`: of its uncached tokens,
    where it is known."""
    if promise.ttft is not None:
        least, uncached = sample.least_uncached_tokens, sample.uncached_tokens
        if service_ms is None or (least is not None and least < uncached):
            service_ms = _prefill_ms(prompts_on, sample, uncached if least is None else min(least, uncached))
        if service_ms + HOP_MS > promise.ttft.limit_ms(uncached):
            return False
    if sample.prompt_tokens + sample.output_tokens > answers_on.kv_capacity_tokens:
        return False
    if promise.tpot is None or sample.output_tokens <= 1:
        return True
    context = sample.prompt_tokens + sample.output_tokens / 2.0
    return decode_ms(answers_on.step, 1.0, context) <= promise.tpot.limit_ms


def decode_ms(step: StepModel, sequences: float, kv_tokens: float) -> float:
    """A step that decodes so many answers with so much context in all."""
    return (
        step.base_ms
        + (step.per_new_token_ms + step.per_sequence_ms) * sequences
        + (step.per_token_context_ms + step.per_kv_token_ms) * kv_tokens
    )


def retimed(window: Window, rps: float) -> Window:
    """The same requests, in the same order and as bursty over short times, but coming at `rps` throughout.

    Each tenth of the window is stretched so that its own rate becomes `rps`, so a window in which the load grew says
    what a steady one at its end would be. None of them spans the window's change (`change_of`), nor the time before its
    first request, and those that are quiet beside `rps` are left out (`_busy`). A window with few requests is repeated.
    """
    if not window.work or rps <= 0.0:
        return Window((), window.length_ms)
    window, edges = _busy(window, _edges(window), rps)
    weights = [0.0] * (len(edges) - 1)
    places = []
    at = 0
    for one in window.work:
        while at < len(weights) - 1 and one.at_ms >= edges[at + 1]:
            at += 1
        weights[at] += one.weight
        places.append(at)
    stretch = [
        weight / (rps * (until - begin) / 1000.0)
        for weight, begin, until in zip(weights, edges, edges[1:], strict=False)
    ]
    starts = [0.0]
    for factor, begin, until in zip(stretch, edges, edges[1:], strict=False):
        starts.append(starts[-1] + factor * (until - begin))
    once = [
        _at(one, starts[at] + (one.at_ms - edges[at]) * stretch[at])
        for one, at in zip(window.work, places, strict=True)
    ]
    length_ms = starts[-1]
    times = max(1, min(MOST_TILED // len(once), round(window.length_ms / length_ms)))
    work = once + [_at(one, one.at_ms + turn * length_ms) for turn in range(1, times) for one in once]
    return Window(tuple(work), length_ms * times)


def _busy(window: Window, edges: list[float], rps: float) -> tuple[Window, list[float]]:
    """Without the parts whose own rate is less than half of `rps`, as long as some are left: a quiet time in fast
    motion is no busy one, as a handful of requests would become a burst that never was."""
    spans = list(pairwise(edges))
    parts: list[list[Work]] = [[] for _ in spans]
    at = 0
    for one in window.work:
        while at < len(spans) - 1 and one.at_ms >= edges[at + 1]:
            at += 1
        parts[at].append(one)
    rates = [
        1000.0 * sum(one.weight for one in part) / (until - begin)
        for part, (begin, until) in zip(parts, spans, strict=True)
    ]
    least = min(BUSY_SHARE * rps, sorted(rates, reverse=True)[min(LEAST_PARTS, len(rates)) - 1])
    if min(rates) >= least:
        return window, edges
    work: list[Work] = []
    ends = [0.0]
    for part, rate, (begin, until) in zip(parts, rates, spans, strict=True):
        if rate >= least and part:
            work += [_at(one, ends[-1] + one.at_ms - begin) for one in part]
            ends.append(ends[-1] + until - begin)
    return Window(tuple(work), window.length_ms), ends


def _edges(window: Window) -> list[float]:
    """Of the parts that are stretched."""
    length_ms = window.length_ms
    edges = [window.work[0].at_ms]
    for until in (*window.changes_ms, length_ms):
        begin = edges[-1]
        if until > begin:
            parts = max(1, round(BLOCKS * (until - begin) / length_ms))
            edges += [begin + (until - begin) * (part + 1) / parts for part in range(parts)]
    return edges


def changes_of(work: Sequence[Work], length_ms: float) -> tuple[float, ...]:
    """When the rate changed: where two rates explain the arrivals best, and so on in the part after that. One does as
    well where the two differ by less than `CHANGED` standard deviations.

    With a of W requests in the first part x of the time and b in the rest, two rates are likelier by the factor
    exp(a ln(a / (x W)) + b ln(b / ((1 - x) W))); twice the exponent is about the square of the deviation.
    """
    counts = [0.0] * _CHANGES
    for one in work:
        counts[min(int(one.at_ms * _CHANGES / length_ms), _CHANGES - 1)] += one.weight
    found: list[float] = []
    first = 0
    while True:
        whole, before = sum(counts[first:]), 0.0
        best, first_then = 0.5 * CHANGED**2, first
        for at in range(first + 1, _CHANGES):
            before += counts[at - 1]
            after, share = whole - before, (at - first) / (_CHANGES - first)
            likelier = before * math.log(before / (share * whole)) if before > 0.0 else 0.0
            likelier += after * math.log(after / ((1.0 - share) * whole)) if after > 0.0 else 0.0
            if likelier > best:
                best, first_then = likelier, at
        if first_then == first:
            return tuple(found)
        first = first_then
        found.append(first * length_ms / _CHANGES)


def _at(one: Work, at_ms: float) -> Work:
    # By position: a window has thousands.
    return Work(
        at_ms,
        one.weight,
        one.uncached_tokens,
        one.service_ms,
        one.limit_ms,
        one.tokens,
        one.context_tokens,
        one.room_tokens,
        one.feasible,
    )


def _prefill_ms(pool: PoolView, sample: RequestSample, uncached_tokens: int) -> float:
    # A full hit still computes the last token.
    new_tokens = max(1, uncached_tokens)
    return pool.step.prefill_ms(
        new_tokens=new_tokens,
        cached_tokens=max(0, sample.prompt_tokens - new_tokens),
        chunk_tokens=pool.chunk_tokens,
    )
