"""One suite on both transports: what `Transport` promises, whichever moves the bytes."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
import uvloop

from tests.support.transport_scenarios import SCENARIOS, run_scenario


@pytest.mark.parametrize("name", SCENARIOS)
def test_tcp_on_the_plain_loop(name: str) -> None:
    asyncio.run(run_scenario(name, "tcp"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_tcp_on_uvloop(name: str) -> None:
    uvloop.run(run_scenario(name, "tcp"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_ucx(name: str) -> None:
    """In a process of its own; it also has to be quiet."""
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.transport_scenarios", name, "ucx"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("passed\n", "")
