"""The requests of one Model that came in the last minutes: what is kept of them for scaling. Pure.

    arrived ─▶ a count in its bucket of 10 s          ended ─▶ one sample

The one idea: memory and the cost of telling are bounded, whatever the load, and sums stay true. When there are twice as
many samples as may be told, neighbours in time become one, which stands for both (`thinned`), and from then on one
sample is kept of as many requests as one stands for. So each is thinned a few times at most, however long it goes on.

Times are Unix milliseconds.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from antiphon_policy.scaling.news import MOST_NEWS_SAMPLES
from antiphon_policy.scaling.records import ArrivalCounts, RequestSample

WINDOW_MS = 300_000.0
BUCKET_MS = 10_000.0

UNKNOWN_OUTPUT_TOKENS = 128.0
"""What is expected of an answer while none has ended."""

_FADES = 1.0 - 1.0 / 500.0
"""What is expected is the mean of the last 500 answers or so."""

_arrival = attrgetter("at_ms")


class DemandWindow:
    """See the module."""

    def __init__(self, since_ms: float, draw: Callable[[], float] = random.random) -> None:
        """`since_ms`: from now on is counted. `draw`: in [0, 1)."""
        self.since_ms = since_ms
        self._draw = draw
        self._ended: list[RequestSample] = []
        self._stands_for = 1.0
        """One is kept of so many requests."""
        self._last: RequestSample | None = None
        """Of those since the last one was kept, the one that stands for them; its weight is how many they are."""
        self._arrived: dict[int, int] = defaultdict(int)
        """By the number of the bucket, counted from 1970."""
        self._hits: dict[int, dict[str, int]] = {}
        """By the same, and worker id."""
        self._answers = self._output_tokens = 0.0
        self._prompt_tokens = self._uncached_tokens = 0.0

    # -- what happens

    def arrived(self, at_ms: float, choices: int) -> None:
        number = int(at_ms // BUCKET_MS)
        if number not in self._arrived:
            self._forget_buckets(at_ms - WINDOW_MS)
        self._arrived[number] += choices

    def ended(self, sample: RequestSample, *, served: bool) -> None:
        """`served`: its answer came; else its figures are what was expected of it."""
        if served:
            self._answers = self._answers * _FADES + 1.0
            self._output_tokens = self._output_tokens * _FADES + sample.output_tokens
            self._prompt_tokens = self._prompt_tokens * _FADES + sample.prompt_tokens
            self._uncached_tokens = self._uncached_tokens * _FADES + sample.uncached_tokens
        if self._stands_for > 1.0:
            last = self._last
            one = self._last = sample if last is None else _of_both(last, sample, self._draw)
            if one.weight < self._stands_for:
                return
            sample, self._last = one, None
        self._ended.append(sample)
        if len(self._ended) >= 2 * MOST_NEWS_SAMPLES:
            self._forget(sample.at_ms)
            kept = thinned(self._ended, MOST_NEWS_SAMPLES, self._draw)
            if len(kept) < len(self._ended):
                self._ended = list(kept)
                self._stands_for *= 2.0

    def hit(self, at_ms: float, worker_id: str, tokens: int) -> None:
        """So many prompt tokens of a request that came then needed no computing, as the worker held them."""
        bucket = self._hits.setdefault(int(at_ms // BUCKET_MS), defaultdict(int))
        bucket[worker_id] += tokens

    # -- what is expected of requests that have not ended

    @property
    def expected_output_tokens(self) -> float:
        return self._output_tokens / self._answers if self._answers else UNKNOWN_OUTPUT_TOKENS

    @property
    def uncached_share(self) -> float:
        """Of prompt tokens, those that had to be computed."""
        return self._uncached_tokens / self._prompt_tokens if self._prompt_tokens else 1.0

    # -- what is told

    def samples(self, now_ms: float, running: Iterable[RequestSample] = ()) -> tuple[RequestSample, ...]:
        """Of the window, oldest first, with those that have not ended (`running`); never more than may be told."""
        self._forget(now_ms)
        begin_ms = now_ms - WINDOW_MS
        last = () if self._last is None else (self._last,)
        found = self._ended + [sample for sample in (*last, *running) if sample.at_ms >= begin_ms]
        found.sort(key=_arrival)
        return tuple(thinned(found, MOST_NEWS_SAMPLES, self._draw))

    def arrivals(self, now_ms: float) -> ArrivalCounts:
        """Of the whole buckets of the window. Before this gateway counted nobody came to it: the first one is whole."""
        end = int(now_ms // BUCKET_MS)
        first = max(int(self.since_ms // BUCKET_MS), end - int(WINDOW_MS // BUCKET_MS))
        counts = tuple([float(self._arrived.get(number, 0)) for number in range(first, end)])
        return ArrivalCounts(end * BUCKET_MS, BUCKET_MS, counts)

    def hits(self, now_ms: float) -> Mapping[str, int]:
        """Prompt tokens of the window's requests that each worker spared them."""
        self._forget(now_ms)
        found: dict[str, int] = defaultdict(int)
        for bucket in self._hits.values():
            for worker_id, tokens in bucket.items():
                found[worker_id] += tokens
        return found

    def is_empty(self, now_ms: float) -> bool:
        """Nothing of it would be told."""
        self._forget(now_ms)
        return not self._ended and self._last is None and not self._arrived

    def _forget(self, now_ms: float) -> None:
        begin_ms = now_ms - WINDOW_MS
        self._forget_buckets(begin_ms)
        self._ended = [sample for sample in self._ended if sample.at_ms >= begin_ms]
        if self._last is not None and self._last.at_ms < begin_ms:
            self._last = None
        if len(self._ended) < MOST_NEWS_SAMPLES / 4:
            self._stands_for = max(1.0, self._stands_for / 2.0)

    def _forget_buckets(self, begin_ms: float) -> None:
        oldest = int(begin_ms // BUCKET_MS)
        for number in [number for number in self._arrived if number < oldest]:
            del self._arrived[number]
        for number in [number for number in self._hits if number < oldest]:
            del self._hits[number]


def thinned(samples: Sequence[RequestSample], most: int, draw: Callable[[], float]) -> Sequence[RequestSample]:
    """At most so many that stand for all, in their order: their weights add up to the same.

    Neighbours become one, those that stand for little first. Which of the two it is, is drawn by their weights: so
    means and shares stay what they were, on the average, whatever came beside which other.
    """
    kept = list(samples)
    limit = 2.0 * min((sample.weight for sample in kept), default=1.0)
    while len(kept) > most:
        surplus, before = len(kept) - most, kept
        kept = []
        for sample in before:
            if surplus and kept and kept[-1].weight + sample.weight <= limit:
                kept[-1] = _of_both(kept[-1], sample, draw)
                surplus -= 1
            else:
                kept.append(sample)
        limit *= 2.0
    return kept


def _of_both(one: RequestSample, other: RequestSample, draw: Callable[[], float]) -> RequestSample:
    weight = one.weight + other.weight
    return _weighing(one if draw() * weight < one.weight else other, weight)


def _weighing(sample: RequestSample, weight: float) -> RequestSample:
    return RequestSample(
        sample.at_ms,
        sample.uncached_tokens,
        sample.prompt_tokens,
        sample.output_tokens,
        weight,
        sample.ttft_ms,
        sample.tpot_ms,
        sample.least_uncached_tokens,
    )
