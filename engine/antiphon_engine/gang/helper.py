"""A helper process of the worker, seen from the worker: started, listened to, and ended for certain.

A helper gets what it is to do as one line on its standard input and ends when that closes, so also when the worker is
killed. It has a session of its own: a terminal's Ctrl-C and a kill of the worker's process group leave it the time to
clear up. `close` gives it a deadline and then kills it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque

import msgspec

from antiphon_engine.gang.helper_events import EVENTS, Event

logger = logging.getLogger("antiphon.engine.gang")

_LAST_LINES = 12


class HelperEnded(Exception):
    """It ended without saying why; the message has its last words on standard error."""


class Helper:
    """Used from one thread at a time, but for `close`."""

    def __init__(self, module: str, task: msgspec.Struct, environment: dict[str, str] | None = None) -> None:
        self._name = module.rpartition(".")[2]
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._said: deque[str] = deque(maxlen=_LAST_LINES)
        self._ended = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=reads, name=f"{self._name}-{what}", daemon=True)
            for what, reads in (("events", self._read_events), ("errors", self._read_errors))
        ]
        for thread in self._threads:
            thread.start()
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):  # it has ended already: `next` says so
            stdin.write(msgspec.json.encode(task) + b"\n")
            stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def next(self, wait_s: float) -> Event | None:
        """The next thing it says; None: nothing within that time. Raises HelperEnded."""
        if self._ended:
            raise HelperEnded(self._last_words())
        try:
            event = self._events.get(timeout=wait_s)
        except queue.Empty:
            return None
        if event is None:
            self._ended = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._threads[1].join(1.0)
            raise HelperEnded(self._last_words())
        return event

    def close(self, deadline_s: float) -> None:
        """Have it end, and end it when it does not. Idempotent."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):
            stdin.close()
        began = time.monotonic()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            logger.warning("the %s did not end within %.0f s and is killed", self._name, deadline_s)
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(max(0.0, began + deadline_s - time.monotonic()))

    def _read_events(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                try:
                    self._events.put(EVENTS.decode(line))
                except msgspec.DecodeError:
                    self._said.append(line.decode(errors="replace").rstrip())
        self._events.put(None)

    def _read_errors(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        with stderr:
            for line in stderr:
                text = line.decode(errors="replace").rstrip()
                if text:
                    logger.debug("%s: %s", self._name, text)
                    self._said.append(text)

    def _last_words(self) -> str:
        said = " | ".join(self._said) or "without a word"
        return f"the {self._name} ended with code {self._process.poll()}: {said}"
