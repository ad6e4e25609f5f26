"""What may go wrong before a model serves: each error is one sentence that says what to do, and an exit code.

Exit codes: 2 for a model that cannot be used as it is, 3 for too little memory, 4 for a service (the package index)
that cannot be reached.
"""

from __future__ import annotations

from typing import ClassVar


class TorchEngineError(Exception):
    """The model cannot be served. `exit_code` is what a process that needs it ends with."""

    exit_code: ClassVar[int] = 2


class BadModelFolder(TorchEngineError):
    """The folder, or a file that it must hold, is missing or is not what it should be."""


class UnsupportedModel(TorchEngineError):
    """The model is whole, but of a kind that this engine does not run."""


class DamagedCheckpoint(TorchEngineError):
    """Weights are truncated, missing, or of a wrong shape."""


class BadSettings(TorchEngineError):
    """The settings contradict each other or the model."""


class NotEnoughMemory(TorchEngineError):
    """Weights and KV pool do not fit into the memory that this process may use."""

    exit_code: ClassVar[int] = 3


class DemoUnavailable(TorchEngineError):
    """The demo model is not in the cache and could not be downloaded."""

    exit_code: ClassVar[int] = 4
