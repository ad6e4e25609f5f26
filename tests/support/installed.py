"""What optional parts this environment has."""

from __future__ import annotations

import importlib.util


def has_nixl() -> bool:
    """Without it there is no `ucx` transport, and what tests it is skipped."""
    return importlib.util.find_spec("nixl_cu12") is not None
