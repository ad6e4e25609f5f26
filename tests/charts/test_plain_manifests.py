"""The manifests for those who do not use Helm are the chart's."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support import manifests, plain_manifests

FILES = plain_manifests.rendered()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_they_are_current(path: Path) -> None:
    assert path.read_text() == FILES[path], "run `make docs`"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_they_are_valid_and_hold_no_secret(path: Path) -> None:
    objects = list(yaml.safe_load_all(path.read_text()))
    manifests.assert_valid(objects)
    assert not [one for one in objects if one["kind"] == "Secret"]
