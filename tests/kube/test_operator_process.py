"""The tests' operator is started again where its Deployment would do it, and only there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.kube.operator_process import LEASE_NOT_RENEWED, OperatorProcess

PROGRAM = """
import json, pathlib, sys, time
ready = pathlib.Path(sys.argv[sys.argv.index("--ready-file") + 1])
lives = ready.with_suffix(".lives")
life = int(lives.read_text()) + 1 if lives.exists() else 1
lives.write_text(str(life))
ready.write_text(json.dumps({"status_address": f"life-{life}"}))
if life == 1:
    time.sleep(0.2)
    print("error antiphon.operator.lease: %s for 5 s" if "lost" in sys.argv else "error: a fault")
    sys.exit(1)
time.sleep(60)
""".replace("%s", LEASE_NOT_RENEWED)


def operator(folder: Path, *words: str) -> OperatorProcess:
    program = (sys.executable, "-c", PROGRAM)
    return OperatorProcess(folder / "kubeconfig", folder, *words, program=program, revived=True)


async def test_an_operator_that_lost_its_lease_is_started_again(tmp_path: Path) -> None:
    lives = tmp_path / "operator.lives"
    async with operator(tmp_path, "lost") as process:
        await eventually(lambda: lives.read_text() == "2" and process.is_running)
        assert not process.was_ended
        process.kill()
        await process.ended()
        assert process.was_ended
    assert lives.read_text() == "2"


@pytest.mark.parametrize("by", ["a fault", "a signal"])
async def test_any_other_end_stays(tmp_path: Path, by: str) -> None:
    words = ("lost",) if by == "a signal" else ()
    async with operator(tmp_path, *words) as process:
        if by == "a signal":
            process.terminate()
        assert await process.ended() == (1 if by == "a fault" else -15)
    assert (tmp_path / "operator.lives").read_text() == "1"
