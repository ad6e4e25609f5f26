"""How an Antiphon process ends: always through `leave`, as its last act.

The UCX library that the `ucx` transport loads crashes in its own clean-up when the interpreter exits, after all of our
code has run (exit status 139 instead of ours, and a core dump). So a process says what it has to say, flushes, and
leaves without running anybody's exit handlers. Owners close what they own before; nothing may rely on `atexit`.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import sys
from typing import NoReturn


class ExitCode(enum.IntEnum):
    """What an exit status means, the same for every command."""

    OK = 0
    FAILURE = 1
    """Anything that has no number of its own; the log says what."""
    BAD_INPUT = 2
    """A wrong option or a model that cannot be served as it is. Starting again will not help."""
    TOO_LITTLE_MEMORY = 3
    UNAVAILABLE = 4
    """A needed service or port is not available."""


def leave(code: int) -> NoReturn:
    """Flush logs and streams, then end the process at once with `code`."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # Nobody may be left to read the stream; there is then nobody to tell either.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
