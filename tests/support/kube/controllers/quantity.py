"""Kubernetes quantities as exact numbers. Pure."""

from __future__ import annotations

import re
from decimal import Decimal

_SUFFIXES = {
    "m": Decimal("0.001"),
    "": Decimal(1),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50,
}
_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|[MGTP]|[KMGTP]i|)")


def quantity(value: str | float) -> Decimal:
    """`500m` is 0.5, `1Gi` is 1073741824. Raises ValueError."""
    match = _FORM.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is no quantity: a number and none or one of {sorted(_SUFFIXES)[1:]}")
    return Decimal(match[1]) * _SUFFIXES[match[2]]
