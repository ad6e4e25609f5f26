"""What is promised, as a person writes it: `ttft=500ms,tpot=40ms`.

    ttft=500ms          time to first token
    perThousand=60ms    more of it for each thousand prompt tokens that have to be computed
    tpot=40ms           mean time of an answer's tokens after the first

The target is a share of requests: those that an idle worker could have served in time and that are inside both limits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from antiphon_policy.scaling import Promise, TpotTarget, TtftTarget

_UNITS_MS = {"ms": 1.0, "s": 1000.0, "m": 60_000.0, "h": 3_600_000.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_NAMES = "ttft=500ms, perThousand=60ms and tpot=40ms"


class GoalError(ValueError):
    """Words that are no promise; the message says how to write one."""


@dataclass(frozen=True, slots=True)
class Goal:
    ttft_ms: float
    tpot_ms: float
    ttft_ms_per_1k_uncached: float = 0.0
    target: float = 0.99
    """Of the feasible requests."""

    def ttft_limit_ms(self, uncached_tokens: int) -> float:
        return self.ttft_ms + self.ttft_ms_per_1k_uncached * uncached_tokens / 1000.0

    def promise(self, window_s: float = 300.0) -> Promise:
        """As the law is told it. A request is inside if both of its latencies are, so each may miss half as often."""
        percentile = (1.0 + self.target) / 2.0
        return Promise(
            TtftTarget(self.ttft_ms, self.ttft_ms_per_1k_uncached, percentile),
            TpotTarget(self.tpot_ms, percentile),
            window_s,
        )


def duration_ms(words: str) -> float:
    """`500ms`, `40s`, `5m`, `1.5h`. Raises GoalError."""
    found = _DURATION.fullmatch(words.strip())
    if found is None:
        raise GoalError(f"{words!r} is no duration: write a number and ms, s, m or h, such as 500ms")
    return float(found[1]) * _UNITS_MS[found[2]]


def read_goal(words: str, target: float) -> Goal:
    """`ttft=500ms,perThousand=60ms,tpot=40ms`; ttft and tpot have to be there. Raises GoalError."""
    limits: dict[str, float] = {}
    for part in words.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "tpot", "perThousand") or name in limits:
            raise GoalError(f"--sla {words!r}: {part.strip()!r} is not one of {_NAMES}, each at most once")
        limits[name] = duration_ms(value)
    if limits.get("ttft", 0.0) <= 0.0 or limits.get("tpot", 0.0) <= 0.0:
        raise GoalError(f"--sla {words!r}: say both ttft and tpot, and more than 0, such as ttft=500ms,tpot=40ms")
    if not 0.0 < target < 1.0:
        raise GoalError(f"--target {target:g}: a share of requests between 0 and 1, such as 0.99")
    return Goal(limits["ttft"], limits["tpot"], limits.get("perThousand", 0.0), target)
