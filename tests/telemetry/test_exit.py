"""How a process ends: what was said is out, the code is the one meant, and no exit handler runs."""

from __future__ import annotations

import os
import subprocess
import sys

LEAVE = """
import atexit, logging, sys
from antiphon_telemetry import leave, logs
logs.configure("worker")
atexit.register(lambda: print("an exit handler ran"))
logging.getLogger("antiphon.worker").info("the last line")
print("buffered", end="")
{before}
leave(3)
"""


BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def ended(before: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LEAVE.format(before=before)]
    return subprocess.run(command, env=BUFFERED, capture_output=True, text=True, timeout=30, check=False)


def test_streams_and_logs_are_flushed_and_handlers_skipped() -> None:
    done = ended()
    assert done.returncode == 3
    assert done.stdout == "buffered"
    assert "the last line" in done.stderr


def test_a_closed_stream_does_not_change_the_code() -> None:
    assert ended("sys.stdout.close()").returncode == 3


def test_a_reader_that_is_gone_does_not_change_the_code() -> None:
    command = [sys.executable, "-c", LEAVE.format(before="sys.stdin.read()")]
    with subprocess.Popen(command, env=BUFFERED, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.close()
        process.stdin.close()
        assert process.wait(30) == 3
