"""`reasoning_effort`, as variables of the model's chat template: by that name, or as thinking that is on or off.

A template that has a word for neither cannot say it to the model; then the answer's x-antiphon-ignored names it.
"""

from __future__ import annotations

import re

from antiphon_gateway.errors import invalid

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_BY_NAME = re.compile(r"\breasoning_effort\b")
_SWITCH = re.compile(r"\benable_thinking\b")


def effort_variables(effort: str, template: str) -> dict[str, str | bool]:
    """Empty: the template has no word for it. Raises ApiError (400)."""
    if effort not in EFFORTS:
        raise invalid(f"reasoning_effort must be one of {', '.join(EFFORTS)}.", param="reasoning_effort")
    if _BY_NAME.search(template):
        return {"reasoning_effort": effort}
    if _SWITCH.search(template):
        return {"enable_thinking": effort != "none"}
    return {}
