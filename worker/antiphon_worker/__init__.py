"""One worker process: an engine, its peers, its gateways. What it does is a role's (`antiphon_prefill`,
`antiphon_decode`); this package is what all roles share.

Importing it is cheap: what needs an engine, gRPC or torch is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon_worker.options import WorkerOptions
    from antiphon_worker.runtime import run_worker
    from antiphon_worker.service import ServiceFactory, WorkerContext, WorkerService

__all__ = ["ServiceFactory", "WorkerContext", "WorkerOptions", "WorkerService", "run_worker"]

_MODULES = {
    "ServiceFactory": "service",
    "WorkerContext": "service",
    "WorkerOptions": "options",
    "WorkerService": "service",
    "run_worker": "runtime",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"antiphon_worker.{_MODULES[name]}"), name)
