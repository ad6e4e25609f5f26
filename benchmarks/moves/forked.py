"""Worker processes that are forked from one that has imported all there is to import.

A worker of the torch engine imports for many seconds of processor time (one of the timed engine for about one), and
this benchmark starts hundreds of them. A fork server imports once; each worker is a process of its own all the same,
and dies of a signal as any does.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import msgspec

from tests.support.workers import START_DEADLINE_S, ReadyFile, WorkerProcess, Workers

_PRELOADED = ("benchmarks.moves.forked", "antiphon_worker.runtime", "antiphon_prefill", "antiphon_decode")
_OF_TORCH = ("torch", "transformers.models.llama.modeling_llama", "antiphon_engine.torch_engine.factory")


def _run(arguments: Sequence[str], log: str) -> None:
    """In the worker: become `antiphon worker`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for name in list(os.environ):
        if name.startswith(("ANTIPHON_", "OTEL_")):
            del os.environ[name]
    sys.argv = ["antiphon", "worker", *arguments]
    runpy.run_module("antiphon", run_name="__main__", alter_sys=True)


def _forget_main() -> None:
    """Else each process imports anew what was started by `python -m`, with all that this imports."""
    main = sys.modules["__main__"]
    main.__spec__ = None
    if hasattr(main, "__file__"):
        del main.__file__


class ForkedProcess:
    """What is asked of an `asyncio.subprocess.Process`."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.pid is not None and self._process.exitcode is None:
            os.kill(self._process.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int | None:
        # Not in a thread: whoever starts another process looks after all that have ended, and both would read the code.
        while self._process.exitcode is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return self._process.exitcode


class ForkedWorkers(Workers):
    """As `Workers`."""

    def __init__(self, folder: Path, *common: str) -> None:
        super().__init__(folder, *common)
        self._fork = multiprocessing.get_context("forkserver")
        self._fork.set_forkserver_preload([*_PRELOADED, *(_OF_TORCH if "torch" in common else ())])
        self._at = folder
        self._options = common
        self._serials = itertools.count()
        self._forked: list[ForkedProcess] = []

    async def __aexit__(self, *_: object) -> None:
        for process in self._forked:
            process.kill()
        for process in self._forked:
            await process.wait()

    async def start(self, *options: str, environment: Mapping[str, str] | None = None) -> WorkerProcess:
        if environment:
            raise ValueError("a forked worker has the environment of its fork server")
        number = next(self._serials)
        ready, log = self._at / f"forked-{number}.json", self._at / f"forked-{number}.log"
        arguments = [*self._options, *options, "--ready-file", str(ready)]
        process = self._fork.Process(target=_run, args=(arguments, str(log)))
        _forget_main()
        process.start()
        forked: Any = ForkedProcess(process)
        self._forked.append(forked)
        ends_at = time.monotonic() + START_DEADLINE_S
        while not ready.exists():
            assert forked.returncode is None, f"the worker ended with {forked.returncode}:\n{log.read_text()}"
            assert time.monotonic() < ends_at, f"the worker was not ready in time:\n{log.read_text()}"
            await asyncio.sleep(0.02)
        return WorkerProcess(forked, msgspec.json.decode(ready.read_bytes(), type=ReadyFile), log)
