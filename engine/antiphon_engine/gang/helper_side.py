"""The helper's own side: its task, its events, and when it has to end.

Standard output is for events only: whatever else prints goes to standard error, where the worker keeps the last lines.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TypeVar

import msgspec

from antiphon_engine.gang.helper_events import Event

Task = TypeVar("Task", bound=msgspec.Struct)


class Parent:
    """Who started this process. Made once, first of all."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        """Set when the helper has to end: its standard input was closed."""
        self._events = os.dup(sys.stdout.fileno())
        os.set_inheritable(self._events, False)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._lock = threading.Lock()

    def task(self, kind: type[Task]) -> Task:
        """Read it, and watch for the end from then on."""
        line = sys.stdin.buffer.readline()
        task = msgspec.json.decode(line, type=kind)
        threading.Thread(target=self._watch, name="parent", daemon=True).start()
        return task

    def tell(self, event: Event) -> None:
        data = msgspec.json.encode(event) + b"\n"
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._events, data) :]
            except OSError:
                self.gone.set()

    def _watch(self) -> None:
        while sys.stdin.buffer.read(4096):
            pass
        self.gone.set()
