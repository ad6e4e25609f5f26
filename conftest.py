"""`make test` runs all tests in two lanes side by side, to make use of two cores: those that mostly compute, and those
that mostly wait for processes, probes and deadlines. Within a lane they run one after the other, as without lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

# No time is asserted anywhere, and the same change gets the same verdict on every machine.
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

COMPUTING = ("tests/torch_engine/", "tests/engine/", "tests/policy/", "e2e/")
"""All others wait."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """With `--dist loadscope` a scope is a lane."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "computing" if nodeid.startswith(COMPUTING) else "waiting"

    return Lanes(config, log)
