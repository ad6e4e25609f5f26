"""Child processes: restarted when they crash, given up when a restart cannot help, ended in time, never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from antiphon import tether
from antiphon.children import LONGEST_PAUSE_S, Child, ChildSpec, StartFailed, how_it_ended, pause_s
from antiphon.console import Console


class Listener(Console):
    """A console that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.heard: asyncio.Queue[str] = asyncio.Queue()

    def say(self, line: str) -> None:
        self.said.append(line)

    def child(self, name: str, line: str) -> None:
        self.heard.put_nowait(f"{name}: {line}")


def python(code: str, name: str = "x", *, ready: Callable[[], bool] | None = None) -> ChildSpec:
    async def is_ready() -> bool:
        return ready is None or ready()

    return ChildSpec(name, (sys.executable, "-u", "-c", code), {"PATH": os.environ["PATH"]}, is_ready=is_ready)


@asynccontextmanager
async def kept(spec: ChildSpec, console: Listener) -> AsyncIterator[tuple[Child, asyncio.Task[None]]]:
    child = Child(spec, console)
    keeper = asyncio.create_task(child.keep())
    try:
        async with asyncio.timeout(30):
            yield child, keeper
    finally:
        await child.stop(5)
        await asyncio.gather(keeper, return_exceptions=True)


WAIT = "import time; print('up'); time.sleep(60)"


async def test_its_lines_are_heard_whole() -> None:
    console = Listener()
    code = "import sys,time; sys.stdout.write('one\\ntw'); sys.stdout.flush(); sys.stderr.write('o\\nend')"
    assert await Child(python(code, "x"), console).once() == 0
    heard = [console.heard.get_nowait() for _ in range(console.heard.qsize())]
    assert heard == ["x: one", "x: two", "x: end"]


async def test_a_crashed_child_is_started_again_and_that_is_said() -> None:
    console = Listener()
    async with kept(python(WAIT, "decode-0"), console) as (child, _):
        await console.heard.get()
        await child.ready.wait()
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await console.heard.get()
        await child.ready.wait()
        assert child.pid != first
    assert console.said[:2] == ["decode-0 was killed by SIGKILL; starting it again in 0.2 s", "decode-0 is back"]


@pytest.mark.parametrize("code", [2, 3, 4])
async def test_a_first_start_that_is_hopeless_is_given_up_with_its_code_and_its_words(code: int) -> None:
    program = f"import sys; print('the folder is empty'); sys.exit({code})"
    async with kept(python(program, "p", ready=lambda: False), Listener()) as (_, keeper):
        with pytest.raises(StartFailed) as caught:
            await keeper
    assert str(caught.value) == f"p cannot be started, it ended with exit code {code}: the folder is empty"
    assert caught.value.code == code


async def test_a_first_start_that_crashes_again_and_again_is_given_up() -> None:
    console = Listener()
    async with kept(python("raise SystemExit(7)", "p", ready=lambda: False), console) as (_, keeper):
        with pytest.raises(StartFailed) as caught:
            await keeper
    assert caught.value.code == 1
    assert len(console.said) == 2


async def test_a_child_that_was_ready_once_is_not_given_up_even_for_code_2() -> None:
    console = Listener()
    program = "import time; print('up'); time.sleep(0.3); raise SystemExit(2)"
    async with kept(python(program), console) as (_, keeper):
        for _ in range(3):
            await console.heard.get()
        assert not keeper.done()


async def test_stop_ends_a_child_that_heeds_no_sigterm() -> None:
    console = Listener()
    stubborn = "import signal,time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(60)"
    async with kept(python(stubborn), console) as (child, keeper):
        await console.heard.get()
        await child.stop(0.2)
        await keeper
    assert child.pid is not None
    assert not psutil.pid_exists(child.pid)


async def test_stop_does_not_wait_for_the_pause_before_a_restart() -> None:
    console = Listener()
    async with kept(python("print('up'); raise SystemExit(1)"), console) as (child, keeper):
        for _ in range(3):
            await console.heard.get()
        await child.stop(5)
        await keeper


def test_the_pause_doubles_and_is_bounded() -> None:
    assert [pause_s(n) for n in (1, 2, 3, 4)] == [0.2, 0.4, 0.8, 1.6]
    assert pause_s(50) == LONGEST_PAUSE_S


def test_an_end_is_told_in_words() -> None:
    assert how_it_ended(1) == "ended with exit code 1"
    assert how_it_ended(-11) == "was killed by SIGSEGV"


def test_a_tethered_process_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent_code = (
        "import subprocess, sys\n"
        "from antiphon import tether\n"
        "child = subprocess.Popen(tether.command('/bin/sleep', '60'), start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait(10)
        psutil.wait_procs([child], timeout=10)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_tethered_process_ends_when_its_parent_is_already_gone() -> None:
    command = list(tether.command("/bin/sleep", "60"))
    command[command.index(str(os.getpid()))] = "999999999"
    assert subprocess.run(command, timeout=10, check=False).returncode == 1
