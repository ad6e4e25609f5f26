"""Arrivals over days, as whoever decides keeps them: what gateways count of the last minutes, added up and kept.

    news of gateways ──▶ slots of 10 s, the last five hours ──▶ slots of five minutes, two days before that

A gateway tells the same buckets again and again; of each gateway it is remembered up to when it was counted, so nothing
counts twice, also not when another operator goes on. A time of which nobody told anything (no operator looked for
longer than the gateways' window) is taken to have been like the first that is told of afterwards: zeros would be read
as a load that had gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from antiphon_policy.scaling.news import GatewayNews
from antiphon_policy.scaling.records import ArrivalCounts

SLOT_MS = 10_000.0
PAST_SLOTS = 30
"""Slots in one of the past."""
MOST_RECENT = 1800
MOST_PAST = 576
_DAY_MS = 86_400_000.0
_MOST_GATEWAYS = 100


class History(msgspec.Struct, frozen=True, omit_defaults=True):
    """See the module's docstring. Counts are per slot, oldest first."""

    end_ms: float = 0.0
    """Of the last slot; 0: nothing is known yet."""
    recent: tuple[float, ...] = ()
    past: tuple[float, ...] = ()
    """Of `PAST_SLOTS` slots each, up to where `recent` begins."""
    counted_ms: dict[str, float] = {}
    """By gateway: its buckets up to then are in."""
    whole_ms: float = 0.0
    """Up to then all gateways that tell anything have been counted."""

    def heard(self, news: Sequence[GatewayNews]) -> History:
        """With what these gateways counted since. Give it the fresh ones: a silent one would hold up the others."""
        fresh = [(one, buckets) for one in news if (buckets := _new_buckets(one, self.counted_ms))]
        newest_ms = max((buckets[-1][1] for _, buckets in fresh), default=0.0)
        fresh = [(one, buckets) for one, buckets in fresh if buckets[0][0] > newest_ms - SLOT_MS * MOST_RECENT]
        if self.end_ms > newest_ms + SLOT_MS * MOST_RECENT and fresh:
            # A clock went back by hours: what is here is of another time.
            return History().heard(news)
        history = self
        if fresh:
            begins_ms = min(buckets[0][0] for _, buckets in fresh)
            ends_ms = max(buckets[-1][1] for _, buckets in fresh)
            slots = self._reaching(begins_ms, ends_ms, [bucket for _, buckets in fresh for bucket in buckets])
            for _, buckets in fresh:
                for start_ms, end_ms, count in buckets:
                    slots.add(start_ms, end_ms, count)
            counted = {**self.counted_ms, **{one.gateway_id: buckets[-1][1] for one, buckets in fresh}}
            newest = sorted(counted.items(), key=lambda item: item[1])[-_MOST_GATEWAYS:]
            history = slots.kept(self.past, dict(newest), self.whole_ms)
        ends = [history.counted_ms[one.gateway_id] for one in news if one.gateway_id in history.counted_ms]
        whole_ms = max(self.whole_ms, min(ends, default=0.0))
        return history if whole_ms == history.whole_ms else msgspec.structs.replace(history, whole_ms=whole_ms)

    def arrivals(self) -> ArrivalCounts:
        """As the law takes them: only slots of which every gateway told; with the days before where there are two."""
        late = max(0, round((self.end_ms - self.whole_ms) / SLOT_MS))
        counts = list(self.recent[: len(self.recent) - late])
        if not counts:
            return ArrivalCounts(bucket_ms=SLOT_MS)
        days_ms = SLOT_MS * (len(counts) + PAST_SLOTS * len(self.past))
        if days_ms >= 2.0 * _DAY_MS:
            counts = [round(count / PAST_SLOTS, 3) for count in self.past for _ in range(PAST_SLOTS)] + counts
        return ArrivalCounts(self.end_ms - late * SLOT_MS, SLOT_MS, tuple(counts), _DAY_MS)

    def _reaching(self, begins_ms: float, ends_ms: float, told: list[tuple[float, float, float]]) -> _Slots:
        """Slots from where this history begins to where the new buckets end."""
        end_ms = math.ceil(ends_ms / SLOT_MS) * SLOT_MS
        if not self.recent:
            start_ms = math.floor(begins_ms / SLOT_MS) * SLOT_MS
            return _Slots(start_ms, [0.0] * max(1, round((end_ms - start_ms) / SLOT_MS)))
        start_ms = self.end_ms - SLOT_MS * len(self.recent)
        missing = max(0, round((min(begins_ms, end_ms) - self.end_ms) / SLOT_MS))
        spans_ms = sum(end - start for start, end, _ in told)
        like = SLOT_MS * sum(count for _, _, count in told) / spans_ms if spans_ms else 0.0
        if missing > MOST_RECENT:
            # Nothing of it would be kept.
            start_ms, missing, counts = self.end_ms + SLOT_MS * missing - SLOT_MS, 0, [like]
        else:
            counts = list(self.recent)
        counts += [round(like, 3)] * missing
        counts += [0.0] * max(0, round((end_ms - start_ms) / SLOT_MS) - len(counts))
        return _Slots(start_ms, counts)


class _Slots:
    """Counts while they are added to."""

    def __init__(self, start_ms: float, counts: list[float]) -> None:
        self._start_ms = start_ms
        self._counts = counts

    def add(self, start_ms: float, end_ms: float, count: float) -> None:
        """A bucket that is longer than a slot, or crosses its borders, is spread over the slots that it covers."""
        first = math.floor((start_ms - self._start_ms) / SLOT_MS)
        last = math.ceil((end_ms - self._start_ms) / SLOT_MS)
        for slot in range(max(0, first), min(last, len(self._counts))):
            from_ms = self._start_ms + slot * SLOT_MS
            covered_ms = min(end_ms, from_ms + SLOT_MS) - max(start_ms, from_ms)
            self._counts[slot] = round(self._counts[slot] + count * covered_ms / (end_ms - start_ms), 3)

    def kept(self, past: tuple[float, ...], counted_ms: dict[str, float], whole_ms: float) -> History:
        end_ms = self._start_ms + SLOT_MS * len(self._counts)
        counts, older = self._counts, list(past)
        while len(counts) > MOST_RECENT:
            older.append(round(sum(counts[:PAST_SLOTS]), 3))
            counts = counts[PAST_SLOTS:]
        return History(end_ms, tuple(counts), tuple(older[-MOST_PAST:]), counted_ms, whole_ms)


def _new_buckets(news: GatewayNews, counted_ms: dict[str, float]) -> list[tuple[float, float, float]]:
    """(start, end, count) of the buckets that were not counted yet, oldest first."""
    told = news.arrivals
    if not (math.isfinite(told.end_ms) and math.isfinite(told.bucket_ms)) or told.bucket_ms <= 0.0:
        return []
    before_ms = counted_ms.get(news.gateway_id, float("-inf"))
    first_ms = told.end_ms - told.bucket_ms * len(told.counts)
    found = []
    for number, count in enumerate(told.counts[-MOST_RECENT:], start=max(0, len(told.counts) - MOST_RECENT)):
        start_ms = first_ms + number * told.bucket_ms
        end_ms = start_ms + told.bucket_ms
        if before_ms + 1.0 < end_ms <= news.at_ms + SLOT_MS:
            found.append((start_ms, end_ms, count if math.isfinite(count) and count > 0.0 else 0.0))
    return found
