"""Processes of `antiphon` that are forked from one which has imported all there is to import.

A worker of the torch engine imports for five seconds of processor time, one of the timed engine for more than one, and
the tests start hundreds of them. A fork server imports once. What it forks is a process of its own all the same: with
its arguments, environment and log, killed and stopped by signals as any.

    process = await start_forked(TIMED_MODULES, ("worker", "--engine", "timed"), environment, log)

One server for each set of modules, made when it is first needed, and ended with this process. It is a child of this
process and runs `python -m tests.support.fork_server MODULES...`; both sides are in this file. It has one thread and
no event loop, opens nothing, and so forks nothing but memory.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TIMED_MODULES = ("antiphon.__main__", "antiphon_worker.runtime", "antiphon_prefill", "antiphon_decode", "uvloop")
TORCH_MODULES = (
    *TIMED_MODULES,
    *("torch", "transformers.models.llama.modeling_llama", "antiphon_engine.torch_engine.factory"),
)
_LOOK_S = 0.01
"""How soon a server notices that a process has ended."""


class ForkedProcess:
    """What tests ask of an `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._lock = threading.Lock()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self.returncode is not None:
                return self.returncode
            self._waiting.append((loop, future))
        await future
        assert self.returncode is not None
        return self.returncode

    def ended(self, code: int) -> None:
        """Called by the thread that hears of it."""
        with self._lock:
            self.returncode = code
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            with contextlib.suppress(RuntimeError):  # its loop has ended meanwhile
                loop.call_soon_threadsafe(lambda future=future: future.done() or future.set_result(None))


_making = threading.Lock()
_servers: dict[tuple[str, ...], _Server] = {}


async def start_forked(
    modules: tuple[str, ...], arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> ForkedProcess:
    """`antiphon ARGUMENTS` with exactly this environment, with its output in `log`."""
    return await asyncio.to_thread(_server(modules).start, arguments, environment, log)


def _server(modules: tuple[str, ...]) -> _Server:
    with _making:
        if modules not in _servers:
            _servers[modules] = _Server(modules)
        return _servers[modules]


class _Server:
    """This side of a fork server. Thread-safe."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self._asking = threading.Lock()
        self._started = threading.Condition()
        self._new: list[ForkedProcess] = []
        self._running: dict[int, ForkedProcess] = {}
        threading.Thread(target=self._hear, daemon=True).start()
        atexit.register(self._process.kill)

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedProcess:
        assert self._process.stdin is not None
        with self._asking:
            words = {"arguments": list(arguments), "environment": dict(environment), "log": str(log)}
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
            with self._started:
                assert self._started.wait_for(lambda: self._new, timeout=120), "the fork server does not answer"
                return self._new.pop()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told: dict[str, Any] = json.loads(line)
            if "code" in told:
                self._running.pop(told["pid"]).ended(told["code"])
                continue
            process = self._running[told["pid"]] = ForkedProcess(told["pid"])
            with self._started:
                self._new.append(process)
                self._started.notify()


# ------------------------------------------------------------------ the server's side


def _serve(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    running: set[int] = set()
    rest = b""
    while True:
        readable, _, _ = select.select([0], [], [], _LOOK_S if running else None)
        if readable:
            more = os.read(0, 1 << 16)
            if not more:
                return
            *lines, rest = (rest + more).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    _become(json.loads(line))
                running.add(pid)
                _tell({"pid": pid})
        for pid in tuple(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.discard(pid)
                _tell({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _tell(words: Mapping[str, int]) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def _become(words: Mapping[str, Any]) -> None:
    """In the forked process: `antiphon` with these words."""
    log = os.open(words["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(words["environment"])
    sys.argv = ["antiphon", *words["arguments"]]
    gc.enable()
    code: Any = 1
    try:
        runpy.run_module("antiphon", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else end.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except Exception:
        logging.getLogger("antiphon").exception("this should not have happened")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1:])
