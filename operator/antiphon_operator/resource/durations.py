"""Times as people write them: `500ms`, `90s`, `1h30m`; read to whole milliseconds, and written in one normal form."""

from __future__ import annotations

import re

from antiphon_operator.resource.base import DURATION

_FORM = re.compile(DURATION)
_PART = re.compile(r"([0-9]+)(ms|h|m|s)")
_UNIT_MS = {"h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}


class DurationError(ValueError):
    """Not a time. The message says how to write one."""


def is_duration(text: str) -> bool:
    return text != "" and _FORM.match(text) is not None and not text.endswith("\n")


def parse_duration_ms(text: str) -> int:
    """Milliseconds. Raises DurationError."""
    if not is_duration(text):
        raise DurationError(f"{text!r} is not a time: write one such as 500ms, 90s, 15m or 1h30m")
    return sum(int(number) * _UNIT_MS[unit] for number, unit in _PART.findall(text))


def parse_duration_s(text: str) -> float:
    """Seconds. Raises DurationError."""
    return parse_duration_ms(text) / 1000


def format_duration(duration_ms: int) -> str:
    """The normal form: largest unit first, none of them zero; `0s` for nothing. Raises ValueError below 0."""
    if duration_ms < 0:
        raise ValueError(f"a time is never below zero, this one is {duration_ms} ms")
    parts = []
    for unit, size_ms in _UNIT_MS.items():
        number, duration_ms = divmod(duration_ms, size_ms)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts) or "0s"
