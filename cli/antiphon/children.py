"""Child processes that are kept running: started, listened to, started again when they crash, and ended in time.

Owned by `antiphon.serve`. A `Child` is one place in the house (such as `decode-0`); processes come and go in it. What
may fail: a process that ends before it has once been ready for a reason that a new start cannot mend (StartFailed).
After that a child is started again for as long as it takes, with a growing pause, and every time in one line.

No process is left behind: children are tied to the supervisor's life by the kernel (`antiphon.tether`), have sessions
of their own so that a terminal's Ctrl-C reaches the supervisor only, and are killed as whole groups when they do not
end in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from antiphon_telemetry.exit import ExitCode

from antiphon import tether
from antiphon.console import Console

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
HEALTHY_AFTER_S = 60.0
FIRST_START_TRIES = 3

_POLL_S = 0.05
_LINE_BYTES = 64 * 1024
_HOPELESS = (ExitCode.BAD_INPUT, ExitCode.TOO_LITTLE_MEMORY, ExitCode.UNAVAILABLE)


class StartFailed(Exception):
    """A child cannot be started. `code` is what the supervisor should exit with."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What runs in one place."""

    name: str
    command: tuple[str, ...]
    """The program's absolute path and its arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    before_start: Callable[[], None] = lambda: None
    """Called before each start: removes what an earlier process left."""
    is_ready: Callable[[], Awaitable[bool]] | None = None
    """Asked again and again after each start until it says True. None: ready as soon as it runs."""
    unheard: str = ""
    """Lines with this text are not passed on; empty: all are."""


def pause_s(crashes: int) -> float:
    """How long to wait after the `crashes`-th crash in a row (from 1)."""
    return min(FIRST_PAUSE_S * 2.0 ** (crashes - 1), LONGEST_PAUSE_S)


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


class Child:
    """Keeps one process running. `keep` is its life; `stop` ends it."""

    def __init__(self, spec: ChildSpec, console: Console) -> None:
        self.spec = spec
        """Of the next process there. May be set any time."""
        self.ready = asyncio.Event()
        """Set while the process there is now is ready."""
        self._console = console
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.last_line = ""
        """What it said last."""

    @property
    def pid(self) -> int | None:
        """Of the process there is now."""
        return self._process.pid if self._process is not None else None

    async def once(self) -> int:
        """Run it to its end, once; its exit code."""
        return await self._live(first=True)

    async def keep(self) -> None:
        """Run it until `stop`, starting it again when it ends by itself. Raises StartFailed."""
        crashes = 0
        was_ready = False
        while not self._stopping.is_set():
            started = time.monotonic()
            code = await self._live(first=not was_ready)
            was_ready = was_ready or self.ready.is_set()
            self.ready.clear()
            if self._stopping.is_set():
                return
            crashes = 1 if time.monotonic() - started >= HEALTHY_AFTER_S else crashes + 1
            if not was_ready and (code in _HOPELESS or crashes >= FIRST_START_TRIES):
                said = f": {self.last_line}" if self.last_line else ""
                raise StartFailed(
                    code if code in _HOPELESS else ExitCode.FAILURE,
                    f"{self.spec.name} cannot be started, it {how_it_ended(code)}{said}",
                )
            pause = pause_s(crashes)
            self._console.say(f"{self.spec.name} {how_it_ended(code)}; starting it again in {pause:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def stop(self, deadline_s: float) -> None:
        """End it: SIGTERM, and SIGKILL for its whole group when it has not ended by the deadline. Idempotent."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), deadline_s)
        except TimeoutError:
            self._console.say(f"{self.spec.name} did not end within {deadline_s:.0f} s and is killed")
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End it at once, with whatever it started."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _live(self, *, first: bool) -> int:
        self.spec.before_start()
        process = await asyncio.create_subprocess_exec(
            *tether.command(*self.spec.command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(self.spec.environment),
            start_new_session=True,
        )
        self._process = process
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(self._listen(process))
            watching = tasks.create_task(self._watch_readiness(first=first))
            if self._stopping.is_set():
                self.kill()
            code = await process.wait()
            watching.cancel()
            # Something it started may hold its pipe open: what it said last is waited for, but not for ever.
            await asyncio.wait({listening}, timeout=1.0)
            listening.cancel()
        return code

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        held = b""
        while piece := await process.stdout.read(_LINE_BYTES):
            *lines, held = (held + piece).split(b"\n")
            if len(held) > _LINE_BYTES:
                lines, held = [*lines, held], b""
            for line in lines:
                self._hear(line)
        if held:
            self._hear(held)

    def _hear(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text and not (self.spec.unheard and self.spec.unheard in text):
            self.last_line = text
            self._console.child(self.spec.name, text)

    async def _watch_readiness(self, *, first: bool) -> None:
        if self.spec.is_ready is not None:
            # The other side is another program: there is nothing to wait on but its answer.
            while not await self.spec.is_ready():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        self.ready.set()
        if not first:
            self._console.say(f"{self.spec.name} is back")
