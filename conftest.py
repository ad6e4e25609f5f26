"""`make test` runs all tests in lanes side by side: most of the time is spent waiting, for processes, probes and
deadlines, and what computes needs one core. Within a lane tests run one after the other, as without lanes.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

# No time is asserted anywhere, and the same change gets the same verdict on every machine.
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Of torch, here and in processes that tests start: threads that wait for each other at every barrier stand still
    # whenever another lane has a core. Tests of threads ask for them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run also what is marked exhaustive: minutes more")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `exhaustive`: the second way of what is shown one way, and what takes long for it."""
    if not config.getoption("--exhaustive"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        if left_out:
            items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
            config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def every(pytestconfig: pytest.Config) -> int:
    """The stride through the reference prompts: all of them with --exhaustive."""
    return 1 if pytestconfig.getoption("exhaustive") else 4


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell a failure when it happens: a run that is cut off has told which tests failed before, and of what."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        what = f"{report.nodeid} ({report.when}) failed after {report.duration:.1f} s"
        sys.stdout.write(f"\n{what}:\n{report.longreprtext[-6000:]}\n")


if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

COMPUTING = (
    *("tests/torch_engine/", "tests/engine/"),
    "e2e/test_gang_deaths.py",
)
"""Takes a core. The gangs of `e2e` are here as they have a Ray cluster of another token than those of `tests/gang`, and
a process knows one only."""

OPERATING = ("tests/charts/", "tests/cli/", "tests/cluster/", "tests/gang/", "tests/kube/", "tests/operator/")
"""Gangs and operators are never beside each other: ten processes that start at once take all cores, which an operator's
Lease of seconds may not bear."""


def lane_of(nodeid: str) -> str:
    """The other whole-system tests are no lane, but one after the other what a lane that has ended takes up."""
    if nodeid.startswith(COMPUTING):
        return "computing"
    if nodeid.startswith(OPERATING):
        return "operating"
    return nodeid.partition("::")[0] if nodeid.startswith("e2e/") else "serving"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """With `--dist loadscope` a scope is a lane."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane_of(nodeid)

    return Lanes(config, log)
