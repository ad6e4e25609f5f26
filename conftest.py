"""All tests in two lanes side by side, so that `make test` makes use of two cores: those that mostly compute, and those
that mostly wait for processes, probes and deadlines. Within a lane they run one after the other, as without lanes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent
COMPUTING = ("tests/torch_engine", "tests/worker", "tests/engine", "tests/policy", "e2e")
"""All others wait."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(ROOT).as_posix()
        lane = "computing" if path.startswith(COMPUTING) else "waiting"
        item.add_marker(pytest.mark.xdist_group(lane))
