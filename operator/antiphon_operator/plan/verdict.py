"""What is said of one condition, before it has a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from antiphon_operator.resource.reasons import Reason


@dataclass(frozen=True, slots=True)
class Verdict:
    """Status, reason and sentence."""

    status: Literal["True", "False", "Unknown"]
    reason: Reason
    message: str
