"""The results as a table: medians, and ratios to the plain encode of the same round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

TURNS_SHOWN = (1, 2, 4, 8)

Us = Mapping[str, float]
"""Of one round: microseconds a request by way."""


class Measures(Protocol):
    tokenizer: str
    length: int
    turn: int
    prompt_tokens: float
    us: dict[str, list[float]]


def _rounds(row: Measures) -> Iterator[Us]:
    for number in range(len(row.us["plain"])):
        yield {way: values[number] for way, values in row.us.items()}


def _ratio(row: Measures, of: Callable[[Us], float]) -> str:
    found = [of(us) for us in _rounds(row)]
    return f"{_short(statistics.median(found))} ({_short(min(found))} to {_short(max(found))})"


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def _us(row: Measures, way: str) -> str:
    median = statistics.median(row.us[way])
    return f"{median:.0f}"


def markdown(rows: Sequence[Measures]) -> str:
    lines = [
        "| tokenizer | turn | prompt tokens | plain, us (a token) | cold / plain | kept / plain | kept, us (a token) "
        "| render, us | (render + kept) / (render + plain) | transformers / (render + plain) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.turn not in TURNS_SHOWN:
            continue
        plain, kept = statistics.median(row.us["plain"]), statistics.median(row.us["kept"])
        lines.append(
            f"| {row.tokenizer} | {row.turn} | {row.prompt_tokens:.0f} "
            f"| {plain:.0f} ({plain / row.prompt_tokens:.2f}) "
            f"| {_ratio(row, lambda us: us['cold'] / us['plain'])} "
            f"| {_ratio(row, lambda us: us['kept'] / us['plain'])} "
            f"| {kept:.0f} ({kept / row.prompt_tokens:.3f}) "
            f"| {_us(row, 'render')} "
            f"| {_ratio(row, lambda us: (us['render'] + us['kept']) / (us['render'] + us['plain']))} "
            f"| {_ratio(row, lambda us: us['transformers'] / (us['render'] + us['plain']))} |"
        )
    return "\n".join(lines)
