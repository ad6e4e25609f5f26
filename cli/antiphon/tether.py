"""Runs a program that cannot outlive its parent: `python tether.py PARENT_PID PROGRAM ARGUMENT...`

A supervisor that is killed with SIGKILL can end nobody. So each child is started through this file, which asks the
kernel to kill it when the parent dies (PR_SET_PDEATHSIG, kept across exec) and then becomes the program. It works for
programs that are not ours as well, and needs no code between fork and exec in the parent. It is run as a file, by an
interpreter without site packages, and imports nothing of ours: it adds some ten milliseconds to a start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def command(*program: str) -> tuple[str, ...]:
    """The command line that runs `program` tethered to the process that calls this."""
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *program)


def main(arguments: list[str]) -> None:
    parent, program = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot tie {program[0]} to its parent: {os.strerror(number)}")
        if os.getppid() != parent:
            # It died before the tie was made.
            raise SystemExit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
