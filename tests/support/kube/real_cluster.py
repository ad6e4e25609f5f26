"""A real control plane as the test's cluster: `ANTIPHON_TEST_KUBECONFIG` names it, the test adds the nodes.

It has to have its own controllers and scheduler. Nodes are Node objects played by our kubelet with pods that pretend,
so nothing is scaled but what the pods themselves do: a lost node is noticed after some 40 s, tolerations and back-off
take what they take. Where the cluster has nodes of its own, the test's are tainted, and Models reach them by
`pod_template`. Everything that the test made through this object is deleted at the end.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml

from tests.support.kube.cluster import Cluster
from tests.support.kube.controllers.podinfo import is_true
from tests.support.kube.controllers.timing import Timing
from tests.support.kube.fault_proxy import Upstream
from tests.support.kube.kubelets.client import KubeHttp
from tests.support.kube.kubelets.kubelet import Kubelet
from tests.support.kube.kubelets.simulated import SimulatedRuntime
from tests.support.kube.resources import NAMESPACES, NODES

KUBECONFIG_VARIABLE = "ANTIPHON_TEST_KUBECONFIG"
OURS_LABEL = "test.antiphon.dev/node"
NOTICED_WITHIN_S = 120.0


def given_kubeconfig() -> Path | None:
    """Of the real cluster to test on, if one was given."""
    path = os.environ.get(KUBECONFIG_VARIABLE, "")
    return Path(path) if path else None


class KubeconfigCluster(Cluster):
    def __init__(self, given: Path, folder: Path) -> None:
        self.kubeconfig = folder / "kubeconfig"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(given, self.kubeconfig)
        self._folder = folder
        self.timing = Timing(scale=1.0)
        self.pod_template: Mapping[str, Any] = {}
        self.simulated = SimulatedRuntime()
        self._nodes: list[str] = []
        self._namespaces: list[str] = []
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            self.client = await stack.enter_async_context(KubeHttp(self.kubeconfig))
            self.kubelet = await stack.enter_async_context(
                Kubelet(self.kubeconfig, self.simulated, self.timing, heartbeats=True)
            )
            if await self.list(NODES):
                self.pod_template = {
                    "nodeSelector": {OURS_LABEL: "true"},
                    "tolerations": [{"key": OURS_LABEL, "operator": "Exists"}],
                }
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Namespaces first, while the kubelet still confirms the end of their pods."""
        for namespace in self._namespaces:
            await self.client.delete(NAMESPACES, "", namespace)
        for namespace in self._namespaces:
            await self.eventually(functools.partial(self._is_gone, namespace), NOTICED_WITHIN_S)
        for node in self._nodes:
            await self.client.delete(NODES, "", node)
        await self._stack.aclose()
        if self.kubelet.failures:
            raise ExceptionGroup("the test's kubelet went wrong", self.kubelet.failures)

    def kubeconfig_for(self, user: str, *, url: str = "") -> Path:
        """The user is the given one; a proxy logs in by itself."""
        if not url:
            return self.kubeconfig
        config = yaml.safe_load(self.kubeconfig.read_text())
        for cluster in config["clusters"]:
            cluster["cluster"] = {"server": url}
        path = self._folder / f"kubeconfig-{user}"
        path.write_text(yaml.safe_dump(config))
        return path

    def upstream(self) -> Upstream:
        return Upstream(self.client.server, self.client.tls, self.client.token)

    async def add_node(self, name: str, **shape: Any) -> None:
        self._nodes.append(name)
        labels = {**(shape.pop("labels", None) or {}), OURS_LABEL: "true"}
        await super().add_node(name, labels=labels, **shape)

    async def delete_node(self, name: str) -> None:
        await super().delete_node(name)
        self._nodes.remove(name)

    async def namespace(self, name: str, labels: Mapping[str, str] | None = None) -> None:
        self._namespaces.append(name)
        await super().namespace(name, labels)

    async def lose_node(self, name: str) -> None:
        self.freeze_node(name)
        await self.eventually(functools.partial(self._is_away, name), NOTICED_WITHIN_S, what=f"{name} is not Ready")

    def _taints(self) -> tuple[Mapping[str, str], ...]:
        return ({"key": OURS_LABEL, "value": "true", "effect": "NoSchedule"},) if self.pod_template else ()

    async def _is_away(self, name: str) -> bool:
        node = await self.client.get(NODES, "", name)
        return node is None or not is_true(node, "Ready")

    async def _is_gone(self, namespace: str) -> bool:
        return await self.client.get(NAMESPACES, "", namespace) is None
