"""What is wrong with a resource, said so that a person can mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon_operator.resource.reasons import Reason


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: `path` in the object, a reason for machines, and a sentence that says what to change."""

    path: str
    reason: Reason
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class ResourceError(Exception):
    """An object that is not a valid Model. `problems` has at least one entry; the text has them all."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = tuple(problems)
