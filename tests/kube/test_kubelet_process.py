"""Pods as local processes: what a container's process sees, how it is probed and stopped, and that nothing is left."""

from __future__ import annotations

import asyncio
import json
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
from tests.support.kube.controllers.podinfo import has_ended, is_ready
from tests.support.kube.kubelets.process import Image, ProcessWorld
from tests.support.kube.kubelets.samples import NAMESPACE, container, job, pod, pod_spec, template
from tests.support.kube.resources import (
    CONFIG_MAPS,
    JOBS,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    SECRETS,
    SERVICES,
)

PYTHON = Image(entrypoint=(sys.executable, "-u", "-c"), environment={"FROM_IMAGE": "yes"})
WORLD = ProcessWorld(images={"python": PYTHON}, services={"valkey.infra.svc:6379": "127.0.0.1:7777"})
SLEEP = "import signal; signal.pause()"
SERVER = (
    "import http.server, os, sys\n"
    "class Page(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        ok = os.path.exists(sys.argv[2])\n"
    "        self.send_response(200 if ok else 503); self.end_headers(); self.wfile.write(os.environ['ME'].encode())\n"
    "    def log_message(self, *_): pass\n"
    "http.server.HTTPServer((sys.argv[1], 8000), Page).serve_forever()\n"
)
"""Serves on its pod's address, as ready as the file given exists."""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path, world=WORLD) as cluster:
        await cluster.add_node("n-0")
        await cluster.namespace(NAMESPACE)
        yield cluster


def python(code: str, *args: str, **fields: Any) -> dict[str, Any]:
    return container("python", args=[code, *args], **fields)


async def until_ended(cluster: FakeCluster, name: str) -> dict[str, Any]:
    """The first container's terminated state."""

    async def ended() -> dict[str, Any] | None:
        live = await cluster.get(PODS, NAMESPACE, name)
        if live is None or not has_ended(live):
            return None
        terminated: dict[str, Any] = live["status"]["containerStatuses"][0]["state"]["terminated"]
        return terminated

    state = await cluster.eventually(ended, what=f"{name} has ended")
    assert state is not None
    return state


async def until_running(cluster: FakeCluster, name: str, *, restarts: int = 0) -> int:
    """The pid of its process, once it has been started so many times more."""

    async def runs() -> int | None:
        live = await cluster.get(PODS, NAMESPACE, name)
        [status] = ((live or {}).get("status") or {}).get("containerStatuses") or [{}]
        if "running" not in status.get("state", {}) or status["restartCount"] < restarts:
            return None
        return cluster.processes.processes(NAMESPACE, name).get("main")

    pid = await cluster.eventually(runs, what=f"{name} runs")
    assert pid is not None
    return pid


async def log_says(cluster: FakeCluster, name: str, text: str) -> None:
    await cluster.eventually(lambda: text in (cluster.kubelet.log(NAMESPACE, name) or ""), what=f"{name} says {text}")


def server(name: str, file: str, **fields: Any) -> dict[str, Any]:
    own = python(
        SERVER,
        "$(IP)",
        file,
        env=[
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "ME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        ports=[{"name": "http", "containerPort": 8000}],
        **fields,
    )
    return pod(name, pod_spec(own, terminationGracePeriodSeconds=1))


async def test_a_process_has_what_its_container_is_given_and_nothing_of_the_test(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_TEST", "must not be seen")
    metadata = {"namespace": NAMESPACE}
    secret = {"metadata": {"name": "redis", **metadata}, "stringData": {"password": "s3cret"}}
    await cluster.create(SECRETS, {"apiVersion": "v1", "kind": "Secret", **secret})
    config = {"metadata": {"name": "settings", **metadata}, "data": {"level": "debug"}}
    await cluster.create(CONFIG_MAPS, {"apiVersion": "v1", "kind": "ConfigMap", **config})
    code = (
        "import json, os, pathlib, sys\n"
        "files = {str(p): pathlib.Path(p).read_text() for p in sys.argv[1:4]}\n"
        "pathlib.Path(sys.argv[4], 'written').write_text('x')\n"
        "print(json.dumps([dict(os.environ), list(files.values()), sys.argv[5]]))\n"
    )
    own = python(
        code,
        "/etc/redis/password",
        "/etc/settings/level.txt",
        "/etc/info/labels",
        "/scratch",
        "--redis=redis://valkey.infra.svc.cluster.local:6379/0",
        env=[
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
            {"name": "ADDRESS", "value": "$(POD_IP):9000"},
        ],
        volumeMounts=[
            {"name": "redis", "mountPath": "/etc/redis"},
            {"name": "settings", "mountPath": "/etc/settings"},
            {"name": "info", "mountPath": "/etc/info"},
            {"name": "scratch", "mountPath": "/scratch"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    )
    volumes = [
        {"name": "redis", "secret": {"secretName": "redis"}},
        {"name": "settings", "configMap": {"name": "settings", "items": [{"key": "level", "path": "level.txt"}]}},
        {
            "name": "info",
            "projected": {
                "sources": [
                    {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}}
                ]
            },
        },
        {"name": "scratch", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    await cluster.create(PODS, pod("one", pod_spec(own, volumes=volumes, restartPolicy="Never")))
    await until_ended(cluster, "one")
    live = await cluster.get(PODS, NAMESPACE, "one")
    assert live is not None
    said = cluster.kubelet.log(NAMESPACE, "one")
    assert said is not None
    environment, files, redis = json.loads(said)
    address = live["status"]["podIP"]
    assert address.startswith("127.")
    assert address != "127.0.0.1"
    assert environment["ADDRESS"] == f"{address}:9000"
    assert environment["PASSWORD"] == "s3cret"
    assert environment["FROM_IMAGE"] == "yes"
    assert "OF_THE_TEST" not in environment
    assert environment["TMPDIR"].startswith(environment["HOME"].removesuffix("home"))
    assert files == ["s3cret", "debug", 'app="one"\n']
    assert redis == "--redis=redis://127.0.0.1:7777/0"


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


async def test_init_containers_run_in_order_and_before(cluster: FakeCluster) -> None:
    volume = {"volumes": [{"name": "shared", "emptyDir": {}}]}
    mount = [{"name": "shared", "mountPath": "/shared"}]
    append = "import sys; open(sys.argv[1], 'a').write(sys.argv[2])"
    first = python(append, "/shared/file", "a", volumeMounts=mount) | {"name": "first"}
    second = python(append, "/shared/file", "b", volumeMounts=mount) | {"name": "second"}
    show = python("import sys; print(open(sys.argv[1]).read())", "/shared/file", volumeMounts=mount)
    spec = pod_spec(show, initContainers=[first, second], restartPolicy="Never", **volume)
    await cluster.create(PODS, pod("one", spec))
    await until_ended(cluster, "one")
    assert cluster.kubelet.log(NAMESPACE, "one") == "ab\n"


async def test_a_job_tells_what_it_found_and_a_claim_outlives_it(cluster: FakeCluster) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "weights", "namespace": NAMESPACE},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    await cluster.create(PERSISTENT_VOLUME_CLAIMS, claim)
    volumes = [{"name": "w", "persistentVolumeClaim": {"claimName": "weights"}}]
    mount = [{"name": "w", "mountPath": "/models"}]
    write = python(
        "import sys; open(sys.argv[1], 'w').write('w'); open(sys.argv[2], 'w').write('abc')",
        "/models/file",
        "/dev/termination-log",
        volumeMounts=mount,
    )
    await cluster.create(JOBS, job("fetch", template(pod_spec(write, volumes=volumes))))

    async def done() -> list[dict[str, Any]]:
        return [each for each in await cluster.pods(NAMESPACE) if has_ended(each)]

    [ended] = await cluster.eventually(done)
    assert ended["status"]["containerStatuses"][0]["state"]["terminated"]["message"] == "abc"
    read = python("import sys; print(open(sys.argv[1]).read())", "/models/file", volumeMounts=mount)
    await cluster.create(PODS, pod("reader", pod_spec(read, volumes=volumes, restartPolicy="Never")))
    await until_ended(cluster, "reader")
    assert cluster.kubelet.log(NAMESPACE, "reader") == "w\n"


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


async def test_a_service_is_the_address_of_a_ready_pod(cluster: FakeCluster, tmp_path: Path) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": NAMESPACE},
        "spec": {"selector": {"app": "one"}, "ports": [{"port": 80, "targetPort": "http"}]},
    }
    await cluster.create(SERVICES, service)
    own = python("import sys; print(sys.argv[1])", f"http://web.{NAMESPACE}.svc:80/page")
    await cluster.create(PODS, pod("client", pod_spec(own, restartPolicy="Never")))  # waits: nobody is there yet
    await cluster.create(PODS, server("one", str(tmp_path)))
    await until_ended(cluster, "client")
    live = await cluster.get(PODS, NAMESPACE, "one")
    assert live is not None
    assert cluster.kubelet.log(NAMESPACE, "client") == f"http://{live['status']['podIP']}:8000/page\n"


async def test_a_mounted_secret_follows_a_change(cluster: FakeCluster) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "redis", "namespace": NAMESPACE}}
    await cluster.create(SECRETS, secret | {"stringData": {"password": "old"}})
    code = (
        "import sys, time\n"
        "while (word := open(sys.argv[1]).read()) == 'old': time.sleep(0.02)\n"
        "print(word); time.sleep(100)\n"
    )
    mount = [{"name": "redis", "mountPath": "/etc/redis"}]
    volumes = [{"name": "redis", "secret": {"secretName": "redis"}}]
    own = python(code, "/etc/redis/password", volumeMounts=mount)
    await cluster.create(PODS, pod("one", pod_spec(own, volumes=volumes, terminationGracePeriodSeconds=1)))
    await until_running(cluster, "one")
    await cluster.client.merge_patch(SECRETS, NAMESPACE, "redis", {"stringData": {"password": "new"}})
    await log_says(cluster, "one", "new\n")


async def test_a_mount_that_the_process_cannot_see_is_raised_when_the_cluster_closes(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, world=WORLD)
    with pytest.RaisesGroup(pytest.RaisesExc(Exception, match=r"no argument or variable names its mounts \['/data'\]")):
        async with cluster:
            await cluster.add_node("n-0")
            await cluster.namespace(NAMESPACE)
            own = python(SLEEP, volumeMounts=[{"name": "data", "mountPath": "/data"}])
            await cluster.create(PODS, pod("one", pod_spec(own, volumes=[{"name": "data", "emptyDir": {}}])))

            async def told() -> bool:
                live = await cluster.get(PODS, NAMESPACE, "one")
                return "CreateContainerError" in json.dumps(live)

            await cluster.eventually(told)


async def test_an_unknown_image_cannot_be_pulled(cluster: FakeCluster) -> None:
    await cluster.create(PODS, pod("one", pod_spec(container("registry/none:1"))))

    async def told() -> bool:
        return "ImagePullBackOff" in json.dumps(await cluster.get(PODS, NAMESPACE, "one"))

    await cluster.eventually(told)


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
from tests.kube.test_kubelet_process import *
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
