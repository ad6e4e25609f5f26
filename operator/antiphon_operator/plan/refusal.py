"""Is the spec one that can be planned? And if not: what is known of the one before.

A refused spec changes nothing: what runs goes on running, by the last spec that was good, of which the status keeps
the whole echo. Only where there is none is nothing planned at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from antiphon_operator.plan.clock import stamp
from antiphon_operator.plan.observed import Object
from antiphon_operator.resource.checks import check
from antiphon_operator.resource.effective import EffectiveModel
from antiphon_operator.resource.parse import parse_model
from antiphon_operator.resource.problems import ResourceError
from antiphon_operator.resource.reasons import ConditionType, Phase, Reason
from antiphon_operator.resource.status import shortened


@dataclass(frozen=True, slots=True)
class Admission:
    """`refused`: what is wrong with the spec, empty if nothing. `model` is then by the last good spec, or None."""

    model: EffectiveModel | None
    refused: str = ""

    def status(self, model: Object, now: datetime) -> dict[str, Any]:
        """Status fields of a Model of which nothing is known but that it is refused."""
        kept = (model.get("status") or {}).get("conditions") or ()
        before: Mapping[str, Any] = next((c for c in kept if c.get("type") == ConditionType.READY), {})
        since = before.get("lastTransitionTime") if before.get("status") == "False" else None
        told = {
            "type": str(ConditionType.READY),
            "status": "False",
            "reason": str(Reason.SPEC_REFUSED),
            "message": shortened(self.refused),
            "lastTransitionTime": since or stamp(now),
            "observedGeneration": int(model["metadata"].get("generation") or 0),
        }
        return {
            "observedGeneration": told["observedGeneration"],
            "phase": str(Phase.REFUSED),
            "conditions": [told, *(c for c in kept if c.get("type") != ConditionType.READY)],
        }


def admit(model: Object) -> Admission:
    """See the module's docstring."""
    problems: str
    try:
        parsed = parse_model(model)
    except ResourceError as error:
        return Admission(_last_good(model), str(error))
    problems = "; ".join(str(problem) for problem in check(parsed))
    if not problems:
        return Admission(parsed)
    return Admission(_last_good(model) or parsed, problems)


def _last_good(model: Object) -> EffectiveModel | None:
    effective: Mapping[str, Any] = (model.get("status") or {}).get("effective") or {}
    if not effective:
        return None
    try:
        parsed = parse_model({**model, "spec": effective})
    except ResourceError:
        return None
    return parsed if not check(parsed) else None
