"""Generated loads, and days of a service whose rates alone are known.

`step`, `ramp`, `spike`, `sawtooth` and `constant` are half an hour of Poisson arrivals of one kind of request, with the
rate that their name says. Nothing but time and the rate changes, so what a law does there can be read off its plot.
`servegen` draws arrivals by the rates of ServeGen's file (ten minutes each) and lengths around its medians, thinned to
a mean rate that a few workers can serve.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from antiphon_simulate.records import TraceRequest
from antiphon_simulate.traces import BLOCK_TOKENS, TraceError

_LENGTH_S = 1800.0
COPY_SPREAD_S = 10.0


def _step(at_s: float) -> float:
    """A third, then all of it from 600 s to 1,200 s."""
    return 1.0 if 600.0 <= at_s < 1200.0 else 1.0 / 3.0


def _ramp(at_s: float) -> float:
    """From a fifth up to all of it in 900 s, and down again."""
    return 0.2 + 0.8 * (1.0 - abs(at_s - 900.0) / 900.0)


def _spike(at_s: float) -> float:
    """A quarter, with all of it for 60 s at 600 s and at 1,200 s."""
    return 1.0 if 600.0 <= at_s % 600.0 + 600.0 < 660.0 and at_s >= 600.0 else 0.25


def _sawtooth(at_s: float) -> float:
    """Up from a fifth in 300 s, then down at once, six times."""
    return 0.2 + 0.8 * (at_s % 300.0) / 300.0


def _constant(at_s: float) -> float:
    return 1.0


SHAPES: Mapping[str, Callable[[float], float]] = {
    "constant": _constant,
    "step": _step,
    "ramp": _ramp,
    "spike": _spike,
    "sawtooth": _sawtooth,
}
"""Share of the highest rate, by seconds from the start."""


def generated(shape: str, *, peak_rps: float, seed: int = 0, length_s: float = _LENGTH_S) -> list[TraceRequest]:
    """Prompts around 1,500 tokens and answers around 200, as in a chat service; both log-normal."""
    draws = random.Random(f"{seed} {shape}")
    share = SHAPES[shape]
    return [
        _request(index, 1000.0 * at_s, _drawn(draws, 1500.0, 0.6, 8000), _drawn(draws, 200.0, 0.6, 1000))
        for index, at_s in enumerate(_poisson(draws, lambda at: peak_rps * share(at), peak_rps, length_s))
    ]


def mean_share(shape: str) -> float:
    """Of the highest rate, over the whole load."""
    seconds = range(round(_LENGTH_S))
    return sum(SHAPES[shape](at + 0.5) for at in seconds) / len(seconds)


def servegen(
    path: Path, model: str, *, mean_rps: float, days: float = 14.0, hour_s: float = 3600.0, seed: int = 0
) -> list[TraceRequest]:
    """By the rates of ServeGen's file and the lengths of `servegen_lengths.csv` beside it. `hour_s`: in which an hour
    of them passes: every ten minutes keep their place and their rate against the others, and all of it is shorter. So
    ups and downs are steeper than they were. Raises TraceError."""
    rates = _rates(path, model)[: max(1, round(days * 144))]
    lengths = _lengths(path.with_name("servegen_lengths.csv"), model)
    scale = mean_rps * len(rates) / sum(rates)
    highest = scale * max(rates)
    draws = random.Random(f"{seed} servegen {model}")
    window_s = hour_s / 6.0

    def rate(at_s: float) -> float:
        return scale * rates[min(int(at_s // window_s), len(rates) - 1)]

    times = _poisson(draws, rate, highest, window_s * len(rates))
    return [
        _request(index, 1000.0 * at_s, _between(draws, lengths[:3]), _between(draws, lengths[3:]))
        for index, at_s in enumerate(times)
    ]


def copied(requests: Sequence[TraceRequest], copies: int, seed: int) -> list[TraceRequest]:
    """A service so many times as large, with the same ups and downs: each request comes as often, its copies up to
    `COPY_SPREAD_S` later and with prompts of their own. Closed loops (`after`) stay within their copy."""
    draws = random.Random(f"{seed} copies")
    most_blocks = 1 + max((block for request in requests for block in request.blocks), default=0)
    found: list[TraceRequest] = []
    for number in range(copies):
        first = number * len(requests)
        for request in requests:
            later_ms = 1000.0 * COPY_SPREAD_S * draws.random() if number and request.after is None else 0.0
            found.append(
                replace(
                    request,
                    index=first + request.index,
                    arrival_ms=request.arrival_ms + later_ms,
                    blocks=tuple(block + number * most_blocks for block in request.blocks),
                    after=None if request.after is None else first + request.after,
                )
            )
    found.sort(key=lambda request: (request.arrival_ms, request.index))
    place = {request.index: at for at, request in enumerate(found)}
    return [
        replace(request, index=at, after=None if request.after is None else place[request.after])
        for at, request in enumerate(found)
    ]


def _poisson(draws: random.Random, rate: Callable[[float], float], highest: float, length_s: float) -> Iterator[float]:
    """By thinning the highest rate."""
    at_s = draws.expovariate(highest)
    while at_s < length_s:
        if draws.random() * highest < rate(at_s):
            yield at_s
        at_s += draws.expovariate(highest)


def _drawn(draws: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, round(median * math.exp(draws.gauss(0.0, sigma)))))


def _between(draws: random.Random, quantiles: tuple[float, ...]) -> int:
    """Log-linear between the median, the 90th and the 99th percentile; below, down to a tenth of the median."""
    middle, high, highest = quantiles
    points = ((0.0, max(1.0, middle / 10.0)), (0.5, middle), (0.9, high), (1.0, highest))
    share = draws.random()
    for (low, least), (upper, most) in pairwise(points):
        if share <= upper:
            part = (share - low) / (upper - low)
            return max(1, round(math.exp(math.log(least) * (1.0 - part) + math.log(max(most, least)) * part)))
    return round(highest)


def _rates(path: Path, model: str) -> list[float]:
    found = [float(row["rate_rps"]) for row in _rows(path) if row["model"] == model]
    if not found or sum(found) <= 0.0:
        raise TraceError(f"{path} has no rates of {model}: name one of its models")
    return found


def _lengths(path: Path, model: str) -> tuple[float, ...]:
    for row in _rows(path):
        if row["model"] == model:
            return tuple(float(row[name]) for name in ("in_p50", "in_p90", "in_p99", "out_p50", "out_p90", "out_p99"))
    raise TraceError(f"{path} has no lengths of {model}: it has to lie beside the rates")


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error


def _request(index: int, arrival_ms: float, prompt_tokens: int, output_tokens: int) -> TraceRequest:
    blocks = -(-prompt_tokens // BLOCK_TOKENS)
    return TraceRequest(
        index, arrival_ms, prompt_tokens, output_tokens, tuple(range(index << 16, (index << 16) + blocks))
    )
