"""How a process ends: what was said is out, the code is the one meant, and no exit handler runs."""

from __future__ import annotations

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


def ended(before: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LEAVE.format(before=before)], capture_output=True, text=True, timeout=30, check=False
    )


def test_streams_and_logs_are_flushed_and_handlers_skipped() -> None:
    done = ended()
    assert done.returncode == 3
    assert done.stdout == "buffered"
    assert "the last line" in done.stderr


def test_a_closed_stream_does_not_change_the_code() -> None:
    assert ended("sys.stdout.close()").returncode == 3


def test_a_reader_that_is_gone_does_not_change_the_code() -> None:
    code = LEAVE.format(before="sys.stdout.write('x' * 1000)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(30) == 3
