"""The page about rollouts has every condition, every reason and every note that the planner makes."""

from __future__ import annotations

from pathlib import Path

from antiphon_operator import names
from antiphon_operator.plan.trouble import SEVERITY
from antiphon_operator.resource.reasons import CONDITION_MEANINGS, REASON_MEANINGS, ConditionType, Reason

PAGE = (Path(__file__).parents[3] / "docs" / "rollout.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]


def test_every_condition_is_on_the_page_with_its_meaning() -> None:
    told = {row[0].strip("`"): row[1] for row in ROWS if len(row) == 2}
    for condition in ConditionType:
        assert told[condition] == CONDITION_MEANINGS[condition]


def test_every_reason_is_on_the_page_with_its_meaning_and_a_next_step() -> None:
    reasons = set(Reason)
    told = {row[0].strip("`"): row[1:] for row in ROWS if len(row) == 3 and row[0].strip("`") in reasons}
    assert set(told) == reasons
    for reason in Reason:
        meaning, step = told[reason]
        assert meaning == REASON_MEANINGS[reason]
        assert step


def test_every_note_is_on_the_page() -> None:
    for note in (
        names.COMPLETED_ANNOTATION,
        names.STEP_ANNOTATION,
        names.FAILED_ANNOTATION,
        names.SOURCE_ANNOTATION,
        names.WEIGHTS_ANNOTATION,
        names.ORDINAL_ANNOTATION,
        names.DRAINING_SINCE_ANNOTATION,
        names.WHOLE_ANNOTATION,
        names.MEMORY_ANNOTATION,
    ):
        assert f"`{note}`" in PAGE


def test_no_trouble_is_told_twice() -> None:
    assert len(SEVERITY) == len(set(SEVERITY))
