"""Pods as local processes: how they are probed, restarted and stopped, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.kube.cluster import FakeCluster
from tests.support.kube.controllers.podinfo import is_ready
from tests.support.kube.kubelets.process_samples import (
    SLEEP,
    WORLD,
    log_says,
    python,
    server,
    until_running,
)
from tests.support.kube.kubelets.samples import NAMESPACE, pod, pod_spec
from tests.support.kube.resources import (
    PODS,
)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, world=WORLD) as cluster:
        await cluster.add_node("n-0")
        await cluster.namespace(NAMESPACE)
        yield cluster


async def test_two_pods_have_the_same_port_on_addresses_of_their_own(cluster: FakeCluster, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    gate.write_text("")
    probe = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1}
    for name in ("one", "two"):
        await cluster.create(PODS, server(name, str(gate), readinessProbe=probe))
    pods = await cluster.until_pods(NAMESPACE, ready=2)
    seen = {}
    for each in pods:
        opened = await asyncio.to_thread(
            subprocess.run,
            [
                sys.executable,
                "-c",
                f"import urllib.request as u; print(u.urlopen('http://{each['status']['podIP']}:8000').read())",
            ],
            capture_output=True,
            text=True,
            check=True,
            env={},
        )
        seen[each["metadata"]["name"]] = opened.stdout.strip()
    assert seen == {"one": "b'one'", "two": "b'two'"}


async def test_readiness_follows_the_probe(cluster: FakeCluster, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    probe = {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1, "failureThreshold": 1}
    await cluster.create(PODS, server("one", str(gate), readinessProbe=probe))
    await until_running(cluster, "one")
    gate.write_text("")
    await cluster.until_pods(NAMESPACE, ready=1)
    gate.unlink()

    async def unready() -> bool:
        live = await cluster.get(PODS, NAMESPACE, "one")
        return live is not None and not is_ready(live)

    await cluster.eventually(unready)


async def test_a_failing_liveness_probe_restarts_the_container(cluster: FakeCluster, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    alive.write_text("")
    check = [sys.executable, "-S", "-c", "import os, sys; sys.exit(not os.path.exists(sys.argv[1]))", str(alive)]
    probe = {"exec": {"command": check}, "periodSeconds": 1, "failureThreshold": 1}
    own = python(SLEEP, livenessProbe=probe)
    await cluster.create(PODS, pod("one", pod_spec(own, terminationGracePeriodSeconds=1)))
    first = await until_running(cluster, "one")
    alive.unlink()

    async def restarted() -> bool:
        live = await cluster.get(PODS, NAMESPACE, "one")
        return live is not None and live["status"]["containerStatuses"][0]["restartCount"] >= 1

    await cluster.eventually(restarted)
    assert not psutil.pid_exists(first)


async def test_a_startup_probe_holds_the_others_back(cluster: FakeCluster, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    startup = {"tcpSocket": {"port": "http"}, "periodSeconds": 1, "failureThreshold": 30}
    liveness = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1000}
    await cluster.create(PODS, server("one", str(gate), startupProbe=startup, livenessProbe=liveness))
    [live] = await cluster.until_pods(NAMESPACE, ready=1)
    [status] = live["status"]["containerStatuses"]
    assert (status["started"], status["restartCount"]) == (True, 0)


async def test_sigterm_comes_first_and_after_pre_stop(cluster: FakeCluster, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    code = (
        "import signal, sys\n"
        f"def end(*_): open({str(marks)!r}, 'a').write('term '); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up'); signal.pause()\n"
    )
    hook = {"exec": {"command": ["sh", "-c", f"printf 'hook ' >> {marks}"]}}
    await cluster.create(PODS, pod("one", pod_spec(python(code, lifecycle={"preStop": hook}))))
    await log_says(cluster, "one", "up")
    await cluster.delete(PODS, NAMESPACE, "one")
    await cluster.until_pods(NAMESPACE, ready=0)
    assert marks.read_text() == "hook term "


async def test_the_whole_group_is_killed_when_the_grace_is_over(cluster: FakeCluster) -> None:
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "if child: print('child', child)\n"
        "signal.pause()\n"
    )
    await cluster.create(PODS, pod("one", pod_spec(python(code), terminationGracePeriodSeconds=1)))
    pid = await until_running(cluster, "one")
    await log_says(cluster, "one", "child ")
    child = int((cluster.kubelet.log(NAMESPACE, "one") or "").split()[1])
    codes: list[int] = []

    def listen(kind: str, resource: object, thing: dict[str, Any]) -> None:
        state = thing["status"]["containerStatuses"][0]["state"] if resource == PODS else {}
        if "terminated" in state:
            codes.append(state["terminated"]["exitCode"])

    cluster.api.subscribe(listen)
    await cluster.delete(PODS, NAMESPACE, "one")
    await cluster.until_pods(NAMESPACE, ready=0)
    assert codes[-1] == 128 + signal.SIGKILL
    await cluster.eventually(lambda: not any(_runs(each) for each in (pid, child)))


async def test_a_crash_is_told_with_its_last_words_and_restarted(cluster: FakeCluster) -> None:
    own = python("raise SystemExit('no such device')", terminationMessagePolicy="FallbackToLogsOnError")
    await cluster.create(PODS, pod("one", pod_spec(own)))

    async def loops() -> dict[str, Any] | None:
        live = await cluster.get(PODS, NAMESPACE, "one")
        [status] = ((live or {}).get("status") or {}).get("containerStatuses") or [{}]
        return status if status.get("state", {}).get("waiting", {}).get("reason") == "CrashLoopBackOff" else None

    status = await cluster.eventually(loops)
    assert status is not None
    assert status["lastState"]["terminated"]["message"] == "no such device\n"
    assert status["lastState"]["terminated"]["exitCode"] == 1


async def test_a_lost_node_stands_still(cluster: FakeCluster) -> None:
    await cluster.create(PODS, pod("one", pod_spec(python(SLEEP), terminationGracePeriodSeconds=1)))
    process = psutil.Process(await until_running(cluster, "one"))
    cluster.freeze_node("n-0")
    await cluster.eventually(lambda: process.status() == psutil.STATUS_STOPPED)
    await cluster.heal_node("n-0")
    await cluster.eventually(lambda: process.status() != psutil.STATUS_STOPPED)


async def test_nothing_is_left_when_the_cluster_closes(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path, world=WORLD) as cluster:
        await cluster.add_node("n-0")
        await cluster.namespace(NAMESPACE)
        await cluster.create(PODS, pod("one", pod_spec(python(SLEEP))))
        pid = await until_running(cluster, "one")
    assert not psutil.pid_exists(pid)


def test_processes_die_with_the_kubelet(tmp_path: Path) -> None:
    code = f"""
import asyncio, pathlib, signal
from tests.support.kube.cluster import FakeCluster
from tests.support.kube.kubelets.process_samples import *
from tests.support.kube.kubelets.samples import *
from tests.support.kube.resources import PODS
async def main():
    folder = pathlib.Path({str(tmp_path)!r})
    async with FakeCluster(folder, world=WORLD) as cluster:
        await cluster.add_node("n-0")
        await cluster.namespace(NAMESPACE)
        await cluster.create(PODS, pod("one", pod_spec(python(SLEEP))))
        print(await until_running(cluster, "one"), flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as kubelet:
        try:
            assert kubelet.stdout is not None
            process = psutil.Process(int(kubelet.stdout.readline()))
        finally:
            os.kill(kubelet.pid, signal.SIGKILL)
    process.wait(timeout=10)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
