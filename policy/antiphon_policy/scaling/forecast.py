"""The load that is to be expected when a worker that is asked for now is ready, with the errors that were made so far.

Counts are added up to blocks of half the time that a start takes (`BLOCK_STARTS`), and foreseen in one of two ways:

    trend     mean + share * (level + trend * (damping + damping^2 + ... + damping^steps) - mean)
    season    level * what came one period ago then / what came one period ago now

Level and trend are Holt's, with a damped linear trend. A load that comes in bursts goes back to its mean, one that
steps does not: `share` is how much of a distance from the mean of the last 30 blocks was still there a horizon later,
by least squares over the past. The season is tried on every block of the past beside the trend, and the one with the
smaller mean error counts; the season only where the counts go back two periods and more.

What may come (`Forecast.spread`) is the middle, and above it the errors that were exceeded upwards once in four times
and once in ten, in units of the square root of what was foreseen, because counts scatter so: what was learnt of the
night's scatter serves the morning. The largest that came once alone, with its neighbours, is left out: it was a step,
or no habit. Bursts scatter more than that, so the spread ends at the most that came in one of these blocks, or what
chance alone would add.

A trend is believed as far as it held for two horizons: what the load grew in the last one, and no more than in the one
before. So a ramp is followed, and a step is not taken for the beginning of one.

A *jump* is known before its block is full: the last one, two or three counts that are more than three standard
deviations above what was foreseen, and more than any so many in a row before them, leaving out the last two starts, in
which the same jump may have begun. What came, less one standard deviation, is the middle then, as far as the jumps of
the past were still there a horizon later (`surprises`).

All this is used to go up ahead of the load. It falls as soon as the load does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from antiphon_policy.scaling.records import ArrivalCounts
from antiphon_policy.scaling.surprises import largest_burst, lasting_share, surprises_of

BAND = 0.95
"""`Forecast.upper_rps` is exceeded once in twenty times. It is told, and tells whether the load is another one."""

_SPREAD = ((0.1, 0.1), (0.2, 0.25))
"""(share of all times, by how large a share the load that stands for them is exceeded); the rest is the middle."""

_NO_CHANCE = 2.0
"""Standard deviations above which an error belongs to a jump."""

_BY_CHANCE = NormalDist()

BLOCK_STARTS = 0.5
LEAST_BLOCK_MS = 10_000.0
MOST_BLOCK_MS = 300_000.0

_LEVEL_GAIN = 0.5
_TREND_GAIN = 0.3
_DAMPING = 0.8
_MEAN_BLOCKS = 30
_PRIOR = 10.0
"""The trend is believed as if it had been right so often already."""
_TRIED_BLOCKS = 60
"""The band is that of the last so many blocks."""

_JUMP_COUNTS = 3
_NEW_STARTS = 2.0
"""A jump is new for so many horizons: until then the errors of the past do not know it."""
_SURE = 3.0

_BEGINNING_BLOCKS = 4
"""Of the first forecasts nothing is learnt: there was no trend yet to see."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Requests per second."""

    now_rps: float = 0.0
    """Of late: the level that the forecast starts from."""
    ahead_rps: float = 0.0
    """The middle of what is expected, at the horizon."""
    upper_rps: float = 0.0
    """With the band; never below `now_rps`."""
    horizon_ms: float = 0.0
    spread: tuple[tuple[float, float], ...] = ()
    """What may come at the horizon: (share of all times, rate), the heaviest first; the shares add up to 1."""
    burst_rps: float = 0.0
    """Of the largest block that came as a burst of late (`surprises`); 0: none did."""
    seasonal: bool = False


def forecast(arrivals: ArrivalCounts, horizon_ms: float) -> Forecast:
    """`horizon_ms`: how far ahead; a worker's measured start time, and the time between decisions."""
    block_ms, series = _blocks(arrivals, horizon_ms)
    if not series:
        return Forecast(horizon_ms=horizon_ms)
    steps = max(1, math.ceil(horizon_ms / block_ms))
    levels, trends = _holt(series)
    reach = sum(_DAMPING**step for step in range(1, steps + 1))
    by_trend = [
        max(0.0, level + min(reach * trend, _lasting_growth(series, at, steps)))
        for at, (level, trend) in enumerate(zip(levels, trends, strict=True))
    ]
    by_trend = _reverting(series, by_trend, steps)
    period = round(arrivals.period_ms / block_ms)
    seasonal = False
    said = by_trend
    if period > 2 and len(series) >= 2 * period:
        by_season = _seasonal(series, levels, period, steps, by_trend)
        seasonal = _mean_error(series, by_season, steps, period) < _mean_error(series, by_trend, steps, period)
        said = by_season if seasonal else by_trend
    ahead = said[-1]
    errors = _errors(series, said, steps)
    scatter = math.sqrt(ahead + 1.0)
    seen = max(series[-_TRIED_BLOCKS:])

    def exceeded(share: float) -> float:
        by_chance = _BY_CHANCE.inv_cdf(1.0 - share)
        return ahead + scatter * min(
            _quantile(errors, 1.0 - share, by_chance), max(by_chance, (seen - ahead) / scatter)
        )

    per_second = 1000.0 / block_ms
    now = levels[-1]
    surprises = surprises_of(series, said, steps)
    jump = max(0.0, _jump_rps(arrivals, ahead * per_second, horizon_ms) / per_second - ahead)
    middle = (ahead + lasting_share(surprises, jump) * jump) * per_second
    spread = [(share, max(middle, exceeded(at) * per_second)) for share, at in _SPREAD]
    return Forecast(
        now_rps=now * per_second,
        ahead_rps=middle,
        upper_rps=max(now * per_second, middle, exceeded(1.0 - BAND) * per_second),
        horizon_ms=horizon_ms,
        spread=(*spread, (1.0 - sum(share for share, _ in spread), middle)),
        burst_rps=largest_burst(surprises) * per_second,
        seasonal=seasonal,
    )


def _blocks(arrivals: ArrivalCounts, horizon_ms: float) -> tuple[float, list[float]]:
    """Whole blocks, the newest full; the oldest counts that fill none are left out."""
    wanted_ms = min(max(horizon_ms * BLOCK_STARTS, LEAST_BLOCK_MS), MOST_BLOCK_MS)
    each = max(1, round(wanted_ms / arrivals.bucket_ms))
    counts = arrivals.counts
    first = len(counts) % each
    return each * arrivals.bucket_ms, [sum(counts[at : at + each]) for at in range(first, len(counts), each)]


def _holt(series: Sequence[float]) -> tuple[list[float], list[float]]:
    """Level and trend as they were known after each block."""
    level, trend = series[0], 0.0
    levels, trends = [level], [trend]
    for count in series[1:]:
        foreseen = level + _DAMPING * trend
        new = foreseen + _LEVEL_GAIN * (count - foreseen)
        trend = _TREND_GAIN * (new - level) + (1.0 - _TREND_GAIN) * _DAMPING * trend
        level = max(0.0, new)
        levels.append(level)
        trends.append(trend)
    return levels, trends


def _reverting(series: Sequence[float], said: Sequence[float], steps: int) -> list[float]:
    """What was said, drawn towards the mean of the last blocks as far as the past shows that the load goes back there:
    the share of a distance from the mean that was still there a horizon later, by least squares."""
    means, total = [], 0.0
    for at, count in enumerate(series):
        total += count - (series[at - _MEAN_BLOCKS] if at >= _MEAN_BLOCKS else 0.0)
        means.append(max(0.0, total) / min(at + 1, _MEAN_BLOCKS))
    away = lasted = _PRIOR
    for at in range(max(_BEGINNING_BLOCKS, len(series) - steps - _TRIED_BLOCKS), len(series) - steps):
        distance = said[at] - means[at]
        away += distance * distance / (means[at] + 1.0)
        lasted += distance * (series[at + steps] - means[at]) / (means[at] + 1.0)
    share = min(1.0, max(0.0, lasted / away))
    return [mean + share * (one - mean) for mean, one in zip(means, said, strict=True)]


def _lasting_growth(series: Sequence[float], at: int, steps: int) -> float:
    """What the load grew in the last horizon, and no more than in the one before it."""
    before, earlier = series[max(0, at - steps)], series[max(0, at - 2 * steps)]
    return max(0.0, min(series[at] - before, before - earlier))


def _jump_rps(arrivals: ArrivalCounts, foreseen_rps: float, horizon_ms: float) -> float:
    """0: what came of late is nothing new. New is what began so lately that no forecast for now could know it."""
    counts, bucket_s = arrivals.counts, arrivals.bucket_ms / 1000.0
    new = math.ceil(_NEW_STARTS * horizon_ms / arrivals.bucket_ms)
    surest = jump = 0.0
    for length in range(1, _JUMP_COUNTS + 1):
        before = counts[-length * _TRIED_BLOCKS - new : -new] if len(counts) >= new + 3 * length else counts[:-length]
        if len(counts) < 4 * length:
            continue
        came = sum(counts[-length:])
        most = max(sum(before[at : at + length]) for at in range(len(before) - length + 1))
        foreseen = foreseen_rps * bucket_s * length
        if came > most and came > foreseen + _SURE * math.sqrt(foreseen + 1.0):
            sure = (came - _SURE * math.sqrt(came)) / length
            if sure > surest:
                surest, jump = sure, (came - math.sqrt(came)) / (bucket_s * length)
    return jump


def _seasonal(
    series: Sequence[float], levels: Sequence[float], period: int, steps: int, before: Sequence[float]
) -> list[float]:
    """What the season would have said at each block; what `before` said where there was no period yet."""
    said = list(before)
    for at in range(period, len(series)):
        then = at + steps - period
        if then >= len(series):
            continue
        # A block alone scatters; its neighbours do not come at another time of day.
        ago = _mean(series, then - 1, then + 1)
        base = _mean(series, at - period - 1, at - period + 1)
        said[at] = levels[at] * (ago + 1.0) / (base + 1.0)
    return said


def _mean(series: Sequence[float], first: int, last: int) -> float:
    part = series[max(0, first) : last + 1]
    return sum(part) / len(part)


def _mean_error(series: Sequence[float], said: Sequence[float], steps: int, beginning: int) -> float:
    errors = [abs(series[at + steps] - said[at]) for at in range(beginning, len(series) - steps)]
    return sum(errors) / len(errors) if errors else math.inf


def _errors(series: Sequence[float], said: Sequence[float], steps: int) -> list[float]:
    """Upwards, in units of the square root of what was foreseen; the smallest first. Without the largest that came
    once: what never came before or after it is no habit of this load."""
    first = max(_BEGINNING_BLOCKS, len(series) - steps - _TRIED_BLOCKS)
    errors = [(series[at + steps] - said[at]) / math.sqrt(said[at] + 1.0) for at in range(first, len(series) - steps)]
    if not errors:
        return []
    begin = end = errors.index(max(errors))
    while begin > 0 and errors[begin - 1] > _NO_CHANCE:
        begin -= 1
    while end < len(errors) - 1 and errors[end + 1] > _NO_CHANCE:
        end += 1
    if errors[begin] > _NO_CHANCE:
        errors = errors[:begin] + errors[end + 1 :]
    return sorted(errors)


def _quantile(errors: Sequence[float], share: float, by_chance: float) -> float:
    """With no past to try it on: that of counts which come at random."""
    if len(errors) < 10:
        return by_chance
    return max(0.0, errors[min(len(errors) - 1, math.ceil(share * len(errors)) - 1)])
