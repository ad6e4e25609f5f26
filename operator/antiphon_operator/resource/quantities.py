"""Kubernetes quantities: read exactly, compared by value, and written in one normal form.

`1Gi` and `1024Mi` are the same amount and must not make a new revision, nor count as drift.
"""

from __future__ import annotations

import re
from fractions import Fraction

from antiphon_operator.resource.base import QUANTITY

_FORM = re.compile(QUANTITY)
_SPLIT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", re.ASCII)
_DECIMAL = {unit: Fraction(1000**power) for power, unit in enumerate(("", "k", "M", "G", "T", "P", "E"))}
_BINARY = {unit: Fraction(1024**power) for power, unit in enumerate(("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))}
_WHOLE = _DECIMAL | _BINARY
_UNITS = {"m": Fraction(1, 1000)} | _WHOLE


class QuantityError(ValueError):
    """Not a quantity. The message says how to write one."""


def is_quantity(text: str) -> bool:
    return _FORM.match(text) is not None and not text.endswith("\n")


def parse_quantity(amount: str | int) -> Fraction:
    """The exact amount, in bytes, cores or pieces. Takes longer numbers than a spec may have. Raises QuantityError."""
    text = str(amount)
    parts = _SPLIT.fullmatch(text)
    if parts is None or parts[2] not in _UNITS:
        raise QuantityError(f"{text!r} is not a quantity: write one such as 64Gi, 500m or 2")
    return Fraction(parts[1]) * _UNITS[parts[2]]


def quantity_bytes(amount: str | int) -> int:
    """Whole bytes, rounded up. Raises QuantityError."""
    return -(-parse_quantity(amount) // 1)


def normal_quantity(amount: str | int) -> str:
    """The shortest exact way to write it: equal amounts give equal texts. Raises QuantityError.

    What is finer than a thousandth is rounded up, as the API server does.
    """
    thousandths = -(-parse_quantity(amount) * 1000 // 1)
    if thousandths % 1000:
        return f"{thousandths}m"
    whole = thousandths // 1000
    ways = (f"{whole // int(size)}{unit}" for unit, size in _WHOLE.items() if whole % size == 0)
    return min(ways, key=len) if whole else "0"
