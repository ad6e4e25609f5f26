"""A worker process with its roles: the one place that knows both the runtime and the roles it can play."""

from __future__ import annotations

from antiphon_decode import DecodeService
from antiphon_prefill import PrefillService
from antiphon_worker.options import WorkerOptions
from antiphon_worker.runtime import run_worker as run_with_roles


def run_worker(options: WorkerOptions) -> int:
    """Run one worker until it is told to end; the exit code."""
    return run_with_roles(options, (PrefillService, DecodeService))
