"""A command in a terminal of its own: what it shows, what is typed, and the signals that keys send."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import sys
from collections.abc import AsyncIterator, Sequence

from tests.support.serve import environment

CTRL_C, CTRL_D = "\x03", "\x04"
_START = (
    "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "from antiphon.__main__ import main; main(sys.argv[1:])"
)


class Terminal:
    """`shown` grows as the command writes; `until` waits for words in what came since the last wait."""

    def __init__(self, descriptor: int, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.shown = ""
        self._descriptor = descriptor
        self._seen = 0
        self._grown = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def _read(self) -> None:
        try:
            self.shown += os.read(self._descriptor, 65536).decode(errors="replace")
        except OSError:  # the command has ended
            asyncio.get_running_loop().remove_reader(self._descriptor)
        self._grown.set()

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    async def until(self, words: str) -> str:
        """Everything from the last wait on to where `words` end."""
        try:
            async with asyncio.timeout(20):
                while (at := self.shown.find(words, self._seen)) < 0:
                    self._grown.clear()
                    await self._grown.wait()
        except TimeoutError:
            raise AssertionError(f"{words!r} is not in {self.shown[self._seen :]!r}") from None
        start, self._seen = self._seen, at + len(words)
        return self.shown[start : self._seen]

    async def code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 20)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)


@contextlib.asynccontextmanager
async def in_terminal(arguments: Sequence[str], **variables: str) -> AsyncIterator[Terminal]:
    """`antiphon ARGUMENTS` in a terminal."""
    ours, its = pty.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _START, *arguments),
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            env=environment(TERM="xterm", **variables),
        )
    finally:
        os.close(its)
    terminal = Terminal(ours, process)
    try:
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        terminal.close()
        os.close(ours)
