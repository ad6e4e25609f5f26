"""Why a gang could not start."""

from __future__ import annotations


class GangStartError(Exception):
    """The message says what to do. `exit_code`: as `TorchEngineError`'s, for the process that wanted the gang."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class GangUnschedulable(GangStartError):
    """There is no place for all ranks. The message is a sentence: which bundle lacks what."""


class GangStopped(Exception):
    """The start was given up because the worker was told to end."""
