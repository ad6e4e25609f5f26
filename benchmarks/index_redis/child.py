"""A child process that is asked by lines of JSON on its standard input and answers by such lines on its output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self

ANSWER_DEADLINE_S = 120.0


class Child:
    """The asking end. `async with Child(module, arguments, package) as child: await child.ask("state")`."""

    def __init__(self, module: str, arguments: Sequence[str], package: Path | None) -> None:
        """`package`: the folder that `antiphon_kvtransfer` is taken from, if not the usual one."""
        self._command = (sys.executable, "-m", module, *arguments)
        self._package = package
        self._process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def __aenter__(self) -> Self:
        environment = dict(os.environ)
        if self._package is not None:
            environment["PYTHONPATH"] = str(self._package)
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=64 * 1024 * 1024,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def ask(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"ask": what} | arguments).encode() + b"\n")
        await self._process.stdin.drain()
        line = await asyncio.wait_for(self._process.stdout.readline(), ANSWER_DEADLINE_S)
        assert line, "the child process ended"
        return json.loads(line)


async def answer_lines(answer: Callable[[dict[str, Any]], Awaitable[Any]]) -> None:
    """The answering end: until the standard input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        sys.stdout.write(json.dumps(await answer(json.loads(line))) + "\n")
        sys.stdout.flush()


def cpu_s() -> float:
    """Of this process, all threads."""
    times = os.times()
    return times.user + times.system
