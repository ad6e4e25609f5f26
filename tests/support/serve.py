"""`antiphon serve` as a real process, for tests that want the whole house."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

import psutil

COMMAND = (sys.executable, "-m", "antiphon")
LOST_AFTER_MS = "5000"
"""Longer than the default, unless a test says otherwise: a busy machine that stands still for two seconds is not what
they are about."""


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without options of ours, and with `variables`."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("ANTIPHON_", "OTEL_"))
    } | variables


class ServeProcess:
    """A supervisor, what it says, and its children."""

    def __init__(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, "serve", *arguments],
            env=environment(**{"ANTIPHON_LOST_AFTER_MS": LOST_AFTER_MS} | variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        """Of stdout and stderr, as they came."""
        self._said = threading.Condition()
        self._open_streams = 2
        streams = (self._process.stdout, self._process.stderr)
        self._readers = [threading.Thread(target=self._read, args=(stream,)) for stream in streams]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def base_url(self) -> str:
        """Of the endpoint, without /v1. Waits until the supervisor has told it."""
        return self.wait_for(r"Point any OpenAI client at (\S+)/v1").group(1)

    def wait_for(self, pattern: str, *, after: int = 0, deadline_s: float = 100.0) -> re.Match[str]:
        """The first match in a line from number `after` on. Raises AssertionError when none comes."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.lines[after:] if (match := re.search(pattern, line))), None)

        with self._said:
            self._said.wait_for(lambda: found() is not None or self._open_streams == 0, timeout=deadline_s)
        match = found()
        assert match is not None, f"no line matches {pattern!r}:\n{self.text}"
        return match

    def children(self) -> dict[str, psutil.Process]:
        """By name: valkey, gateway, and workers by their worker id."""
        named = {}
        for child in psutil.Process(self.pid).children(recursive=True):
            words = child.cmdline()
            if any("valkey-server" in word for word in words):
                named["valkey"] = child
            elif "gateway" in words:
                named["gateway"] = child
            elif "worker" in words:
                named[child.environ()["ANTIPHON_WORKER_ID"]] = child
        return named

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal sends it: to the whole foreground group."""
        os.killpg(self.pid, signal.SIGINT)

    def send(self, number: signal.Signals) -> None:
        """A signal to the supervisor alone."""
        self._process.send_signal(number)

    def wait(self, deadline_s: float = 60.0) -> int:
        """Its exit code, with everything it said read."""
        code = self._process.wait(deadline_s)
        for reader in self._readers:
            reader.join(deadline_s)
        return code

    def end(self) -> None:
        """Ctrl-C if it still runs, and no mercy for what does not heed it."""
        if self._process.poll() is None:
            self.interrupt()
            try:
                self._process.wait(40)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _read(self, stream: IO[str] | None) -> None:
        assert stream is not None
        for line in stream:
            with self._said:
                self.lines.append(line.rstrip("\n"))
                self._said.notify_all()
        with self._said:
            self._open_streams -= 1
            self._said.notify_all()


@contextmanager
def serve_process(*arguments: str, **variables: str) -> Iterator[ServeProcess]:
    """`antiphon serve ARGUMENTS` with only `variables` of ours in its environment; ended with the block."""
    process = ServeProcess(arguments, variables)
    try:
        yield process
    finally:
        process.end()


@contextmanager
def running_serve(*arguments: str, **variables: str) -> Iterator[str]:
    """The base URL (without /v1) of a house that is ready, on a free port unless `--port` is among `arguments`."""
    port = () if "--port" in arguments else ("--port", "0")
    with serve_process(*arguments, *port, **variables) as process:
        yield process.base_url
