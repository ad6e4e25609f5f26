"""What is said and kept of decisions: a line for people, a stream in Redis, and a file if one was named.

Most looks find that all is well, as the last one did. Told are those that act, and those whose reason is another; kept
are these and one a minute beside, each with its inputs, so that it can be made again (`antiphon simulate replay`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from antiphon_kvtransfer import RedisAccess
from antiphon_kvtransfer.scaling_decisions import DecisionsUnavailable, write_decision
from antiphon_policy.scaling import ScalingAction, ScalingDecision, ScalingReason
from antiphon_policy.scaling.remembered import Remembered, encode_decision, encode_remembered, most_decisions

KEPT_EVERY_MS = 60_000.0
_QUIET = (ScalingAction.NONE, ScalingAction.FREEZE)


class DecisionLog:
    """See the module. What cannot be written is said once, and serving goes on."""

    def __init__(self, access: RedisAccess, model: str, file: Path | None, say: Callable[[str], None]) -> None:
        self._access = access
        self._model = model
        self._file = file
        self._say = say
        self._reason: ScalingReason | None = None
        self._kept_ms = float("-inf")
        self._trouble: set[str] = set()

    async def tell(self, decision: ScalingDecision, remembered: Remembered) -> None:
        acts = decision.action not in _QUIET
        news = acts or decision.reason is not self._reason
        self._reason = decision.reason
        if news:
            self._say(f"autoscale: {decision.action.value}: {decision.sentence}")
        keep = news or decision.at_ms - self._kept_ms >= KEPT_EVERY_MS
        raw = encode_decision(decision) if keep else b""
        if keep:
            self._kept_ms = decision.at_ms
            self._append(raw)
        try:
            await write_decision(
                self._access, self._model, encode_remembered(remembered), raw, kept=most_decisions(len(raw))
            )
            self._trouble.discard("redis")
        except DecisionsUnavailable as error:
            self._complain("redis", f"decisions are not kept in Redis: {error}")

    def _append(self, raw: bytes) -> None:
        if self._file is None:
            return
        try:
            with self._file.open("ab") as file:
                file.write(raw + b"\n")
        except OSError as error:
            self._complain("file", f"decisions are not written to {self._file}: {error.strerror}")

    def _complain(self, of: str, line: str) -> None:
        if of not in self._trouble:
            self._trouble.add(of)
            self._say(line)
