"""Pods of small Python processes, for tests of the process kubelet: what they run, and waiting for what they become."""

from __future__ import annotations

import sys
from typing import Any

from tests.support.kube.cluster import FakeCluster
from tests.support.kube.controllers.podinfo import has_ended
from tests.support.kube.kubelets.process import Image, ProcessWorld
from tests.support.kube.kubelets.samples import NAMESPACE, container, pod, pod_spec
from tests.support.kube.resources import PODS

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

    state: dict[str, Any] | None = await cluster.eventually(ended, what=f"{name} has ended")
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
