"""docs/faults.md: every reported fault has tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
_TEST = re.compile(r"`((?:tests|e2e)/[\w/]+\.py)::(test_\w+)`")
_SOURCE = re.compile(r"[\w-]+/[\w.-]+#\d+|seen with ")


def _rows() -> list[tuple[str, ...]]:
    return [match.groups() for match in _ROW.finditer((ROOT / "docs" / "faults.md").read_text())]


def test_every_entry_has_a_source_and_a_test() -> None:
    rows = _rows()
    assert [int(row[0]) for row in rows] == list(range(1, 39))
    for row in rows:
        assert _SOURCE.match(row[2]), row
        assert _TEST.match(row[4]), row


def test_the_tests_that_it_names_exist() -> None:
    named = {found for row in _rows() for found in _TEST.findall(row[4])}
    missing = {
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file() or not re.search(rf"def {name}\(", (ROOT / path).read_text())
    }
    assert missing == set()
    assert len(named) >= 38
