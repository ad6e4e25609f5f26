"""Whatever way the worker ends, no process of Ray's and no rank is left; and a rank's death is a new life."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from antiphon_engine.gang.environment import HEAD_PORT
from antiphon_telemetry.exit import ExitCode

from tests.support.gang import descendants, until, until_gone
from tests.torch_engine.parallel.tiny_models import CONFIGS, write_model

START_S = 180.0
WAIT_S = 60.0

DRIVER = """
import sys, threading
from antiphon_engine.gang import ClusterSettings, RayCluster
from tests.support.gang import gang_settings, start_gang
cluster = RayCluster(ClusterSettings())
executor = start_gang(cluster, gang_settings(2))
print(*executor.pids, flush=True)
threading.Event().wait()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gang") / "model", CONFIGS["qwen3"])


def test_a_driver_that_is_killed_leaves_nothing_behind() -> None:
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        everything = descendants(driver.pid)
        assert len(ranks) == 2
        assert {rank.pid for rank in ranks} < {process.pid for process in everything}
        assert any("gcs_server" in process.name() for process in everything)
        driver.kill()
    until_gone(everything)


class Command:
    """An `antiphon worker` process and its log."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.log_path = folder / f"{name}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "antiphon", "worker", *arguments], stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def until_it_says(self, words: str) -> None:
        until(lambda: words in self.log or self.process.poll() is not None, START_S)
        assert words in self.log, self.log

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(WAIT_S)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def test_sigterm_during_the_start_ends_it_and_leaves_nothing(tmp_path: Path, model: Path) -> None:
    with Command(tmp_path, "worker", str(model), "--tensor-parallel", "2", "--transport", "tcp") as worker:
        worker.until_it_says("starting Ray")
        until(lambda: any("gcs_server" in process.name() for process in descendants(worker.process.pid)), START_S)
        everything = descendants(worker.process.pid)
        assert worker.end() == ExitCode.OK
        until_gone(everything)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_gang_of_two_machines_lives_again_when_a_rank_dies(tmp_path: Path, model: Path) -> None:
    """What two pods run. The second machine stays; the worker keeps its name, and is another incarnation."""
    token = tmp_path / "token"
    token.write_text("1f" * 32)
    ready = tmp_path / "ready.json"
    common = (str(model), "--pipeline-parallel", "2", "--spread-stages", "--transport", "tcp", "--no-self-measure")
    common += ("--kv-blocks", "32", "--ray-token-file", str(token), "--ray-node-ranks", "1")
    # Loopback has many addresses: each is a machine to Ray.
    joining = ("--host", "127.0.0.3", "--ray-join", f"127.0.0.2:{HEAD_PORT}")
    heading = ("--host", "127.0.0.2", "--worker-id", "gang-0", "--ready-file", str(ready), "--ray-head")
    with Command(tmp_path, "join", *common, *joining) as join, Command(tmp_path, "head", *common, *heading) as head:
        head.until_it_says("stage 1 needs a node of its own with 1 CPU")
        head.until_it_says("worker ready")
        first = json.loads(ready.read_text())
        everything = descendants(head.process.pid) + descendants(join.process.pid)
        (rank,) = [one for one in descendants(join.process.pid) if "RankProcess" in one.name() + "".join(one.cmdline())]
        rank.kill()
        head.until_it_says("the ranks are lost: rank ")  # Ray may have put either stage there
        until(lambda: json.loads(ready.read_text())["incarnation"] != first["incarnation"], START_S)
        second = json.loads(ready.read_text())
        assert (first["worker_id"], second["worker_id"], second["pid"]) == ("gang-0", "gang-0", first["pid"])
        everything += descendants(head.process.pid) + descendants(join.process.pid)

        assert head.end() == ExitCode.OK
        assert join.process.wait(WAIT_S) == ExitCode.UNAVAILABLE
        assert "the head 127.0.0.2:6380 is gone" in join.log or "Ray's processes ended" in join.log
    until_gone(everything)
