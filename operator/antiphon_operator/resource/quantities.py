"""Kubernetes quantities: read exactly, compared by value, and written in one normal form.

`1Gi` and `1024Mi` are the same amount and must not make a new revision, nor count as drift.
"""

from __future__ import annotations

import re
from fractions import Fraction

from antiphon_operator.resource.base import QUANTITY

_FORM = re.compile(QUANTITY)
_SPLIT = re.compile(r"([0-9.]+)([A-Za-z]*)")
_DECIMAL = {"m": Fraction(1, 1000), "": Fraction(1), "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9)}
_DECIMAL |= {"T": Fraction(10**12), "P": Fraction(10**15)}
_BINARY = {unit: Fraction(1024**power) for power, unit in enumerate(("", "Ki", "Mi", "Gi", "Ti", "Pi")) if unit}
_UNITS = _DECIMAL | _BINARY


class QuantityError(ValueError):
    """Not a quantity. The message says how to write one."""


def is_quantity(text: str) -> bool:
    return _FORM.match(text) is not None and not text.endswith("\n")


def parse_quantity(amount: str | int) -> Fraction:
    """The exact amount, in bytes, cores or pieces. Raises QuantityError."""
    text = str(amount)
    parts = _SPLIT.fullmatch(text) if is_quantity(text) else None
    if parts is None:
        raise QuantityError(f"{text!r} is not a quantity: write one such as 64Gi, 500m or 2")
    number, unit = parts.groups()
    return Fraction(number) * _UNITS[unit]


def quantity_bytes(amount: str | int) -> int:
    """Whole bytes, rounded up. Raises QuantityError."""
    return -(-parse_quantity(amount) // 1)


def normal_quantity(amount: str | int) -> str:
    """The shortest exact way to write it: equal amounts give equal texts. Raises QuantityError.

    Whole amounts take the largest binary unit that divides them (so `1024Mi` is `1Gi`), the others thousandths;
    what is finer than a thousandth is rounded up, as the API server does.
    """
    exact = parse_quantity(amount)
    if exact.denominator != 1:
        thousandths = -(-exact * 1000 // 1)
        if thousandths % 1000:
            return f"{thousandths}m"
        exact = Fraction(thousandths // 1000)
    whole = int(exact)
    for unit, size in reversed(_BINARY.items()):
        if whole and whole % size == 0:
            return f"{whole // int(size)}{unit}"
    return str(whole)
