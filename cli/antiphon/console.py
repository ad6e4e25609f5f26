"""What `antiphon serve` shows: its own lines, and those of its children with their name in front.

Progress and logs go to stderr. What a person came for (where to point a client) goes to stdout.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

_NAME_WIDTH = 10


class Console:
    """Writes whole lines. A terminal that went away is no reason to stop serving, so failing writes are dropped."""

    def __init__(self, *, prefixed: bool = True) -> None:
        self._prefixed = prefixed
        """False: children's lines as they are (JSON lines carry the process's name)."""

    def say(self, line: str) -> None:
        """A line of the supervisor's own."""
        self._write(sys.stderr, f"{'antiphon':<{_NAME_WIDTH}} | {line}")

    def child(self, name: str, line: str) -> None:
        """A line that a child wrote."""
        self._write(sys.stderr, f"{name:<{_NAME_WIDTH}} | {line}" if self._prefixed else line)

    def show(self, text: str) -> None:
        """What a person came for."""
        self._write(sys.stdout, text)

    def _write(self, stream: TextIO, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            stream.write(text + "\n")
            stream.flush()
