"""Why a worker could not start."""

from __future__ import annotations

from antiphon_telemetry.exit import ExitCode


class WorkerStartError(Exception):
    """The message says what to do; `exit_code` is what the process ends with."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineLost(Exception):
    """What computes is gone, and the worker with it; it can live again with another engine."""
