"""A cluster for tests of the operator: the double with its control plane and nodes, or a real one with nodes added.

async with FakeCluster(tmp_path) as cluster:
    await cluster.add_node("gpu-0", gpus=8)
    await cluster.install_crds()
    await cluster.namespace("chat")
    await cluster.create(model)
    await cluster.until_pods("chat", "antiphon.dev/model=qwen", ready=2)

A suite written against `Cluster` runs unchanged on both: everything it does goes over HTTP. On a real cluster
(`KubeconfigCluster`) nodes are Node objects whose kubelet is ours, with pods that only pretend.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar, overload

import yaml

from tests.support.kube.api import Api
from tests.support.kube.controllers.plane import ControlPlane
from tests.support.kube.controllers.podinfo import is_ready, is_true
from tests.support.kube.controllers.timing import Timing
from tests.support.kube.fault_proxy import Upstream
from tests.support.kube.kubelets.client import KubeHttp
from tests.support.kube.kubelets.kubelet import Kubelet
from tests.support.kube.kubelets.node import UNREACHABLE_TAINT, NodeShape, ready_condition
from tests.support.kube.kubelets.process import ProcessRuntime, ProcessWorld
from tests.support.kube.kubelets.simulated import SimulatedRuntime
from tests.support.kube.resources import CRDS, NAMESPACES, NODES, PODS, Resource
from tests.support.kube.server import KubeServer

Object = dict[str, Any]
Objects = list[Object]
T = TypeVar("T")
CRD_FOLDER = Path(__file__).parents[3] / "charts" / "antiphon" / "templates" / "crds"
GPU = "nvidia.com/gpu"
DEADLINE_S = 60.0
POLL_S = 0.02


class Cluster:
    """What both clusters have. `kubeconfig` is for the operator and for kubectl; `client` for the test itself."""

    kubeconfig: Path
    client: KubeHttp
    kubelet: Kubelet
    timing: Timing
    pod_template: Mapping[str, Any]
    """What a Model's `podTemplate` needs so that its pods land on the test's nodes only; empty where all nodes are."""

    @property
    def failures(self) -> list[Exception]:
        """What went wrong in the cluster's own parts, or in the tables that the test gave them."""
        return self.kubelet.failures

    def kubeconfig_for(self, user: str, *, url: str = "") -> Path:
        """A kubeconfig of its own for the operator, or whoever is to be told apart in the requests. `url`: of a proxy
        that stands before the API server."""
        raise NotImplementedError

    def upstream(self) -> Upstream:
        """The API server, for a fault proxy that stands before it."""
        raise NotImplementedError

    # -- nodes

    async def add_node(
        self,
        name: str,
        *,
        gpus: int = 0,
        cpu: str = "64",
        memory: str = "512Gi",
        extended: Mapping[str, int] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        devices = ({GPU: gpus} if gpus else {}) | dict(extended or {})
        shape = NodeShape(name, cpu=cpu, memory=memory, extended=devices, labels=labels or {}, taints=self._taints())
        await self.kubelet.add_node(shape)

    def freeze_node(self, name: str) -> None:
        """Its kubelet does nothing any more. The control plane has not noticed yet."""
        self.kubelet.freeze(name)

    async def lose_node(self, name: str) -> None:
        """Frozen, and the control plane has noticed: the node is not Ready, its pods will be evicted."""
        raise NotImplementedError

    async def heal_node(self, name: str) -> None:
        """It is heard of again: Terminating pods are confirmed, the others become Ready."""
        self.kubelet.thaw(name)
        await self._set_node_ready(name, "True")

    async def delete_node(self, name: str) -> None:
        """The machine is gone for good, and its object is deleted."""
        self.kubelet.forget_node(name)
        await self.client.delete(NODES, "", name)

    async def cordon(self, name: str, *, unschedulable: bool = True) -> None:
        await self.client.merge_patch(NODES, "", name, {"spec": {"unschedulable": unschedulable}})

    # -- objects

    async def install_crds(self, folder: Path = CRD_FOLDER) -> None:
        """Those of the chart, or the newer ones of another folder; returns when they are served."""
        definitions = _manifests(folder)
        for definition in definitions:
            await self.apply(CRDS, definition)
        for definition in definitions:
            await self.eventually(functools.partial(self._established, definition["metadata"]["name"]))

    async def namespace(self, name: str, labels: Mapping[str, str] | None = None) -> None:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": dict(labels or {})}}
        await self.client.create(NAMESPACES, "", body)

    async def create(self, resource: Resource, manifest: Mapping[str, Any]) -> Object:
        return await self.client.create(resource, manifest["metadata"].get("namespace", ""), manifest)

    async def apply(self, resource: Resource, manifest: Mapping[str, Any]) -> None:
        """Created, or merged into what is there."""
        namespace, name = manifest["metadata"].get("namespace", ""), manifest["metadata"]["name"]
        if await self.client.get(resource, namespace, name) is None:
            await self.client.create(resource, namespace, manifest)
        else:
            await self.client.merge_patch(resource, namespace, name, manifest)

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        return await self.client.get(resource, namespace, name)

    async def list(self, resource: Resource, namespace: str = "", labels: str = "") -> Objects:
        """In the order of their names."""
        chosen = {"labelSelector": labels} if labels else {}
        items = (await self.client.list(resource, namespace, **chosen)).get("items") or []
        return sorted(items, key=lambda item: item["metadata"]["name"])

    async def pods(self, namespace: str = "", labels: str = "") -> Objects:
        return await self.list(PODS, namespace, labels)

    async def delete(self, resource: Resource, namespace: str, name: str, *, grace_s: int = -1) -> None:
        await self.client.delete(resource, namespace, name, grace_s=grace_s)

    # -- waiting

    @overload
    async def eventually(
        self, condition: Callable[[], Awaitable[T]], deadline_s: float = DEADLINE_S, *, what: str = ""
    ) -> T: ...

    @overload
    async def eventually(self, condition: Callable[[], T], deadline_s: float = DEADLINE_S, *, what: str = "") -> T: ...

    async def eventually(self, condition: Callable[[], Any], deadline_s: float = DEADLINE_S, *, what: str = "") -> Any:
        """The condition's value once it is true in the sense of `bool`. Fails with what the pods look like."""
        ends_at = time.monotonic() + deadline_s
        while True:
            assert not self.failures, f"the test's cluster itself went wrong: {self.failures}"
            answer = condition()
            value = await answer if inspect.isawaitable(answer) else answer
            if value:
                return value
            if time.monotonic() > ends_at:
                raise AssertionError(f"did not come true in {deadline_s} s: {what}\n{await self.summary()}")
            await asyncio.sleep(POLL_S)

    async def until_pods(
        self, namespace: str, labels: str = "", *, ready: int, deadline_s: float = DEADLINE_S
    ) -> Objects:
        """Exactly so many pods, all of them ready."""

        async def found() -> Objects:
            pods = await self.pods(namespace, labels)
            return pods if len(pods) == ready and all(map(is_ready, pods)) else []

        what = f"{ready} ready pods of {labels or 'any label'} in {namespace}"
        if ready:
            return await self.eventually(found, deadline_s, what=what)
        await self.eventually(functools.partial(self._none, namespace, labels), deadline_s, what=what)
        return []

    async def summary(self) -> str:
        """One line a pod, for messages of failed tests."""
        lines = []
        for pod in await self.pods():
            status, metadata = pod.get("status") or {}, pod["metadata"]
            going = " Terminating" if metadata.get("deletionTimestamp") else ""
            states = [each.get("state") for each in status.get("containerStatuses") or ()]
            words = [f"{metadata['namespace']}/{metadata['name']}", str(status.get("phase")), f"ready={is_ready(pod)}"]
            lines.append(f"{' '.join(words)}{going} on {pod['spec'].get('nodeName')} {states or status}")
        return "\n".join(lines) or "there are no pods"

    # -- inside

    def _taints(self) -> tuple[Mapping[str, str], ...]:
        return ()

    async def _none(self, namespace: str, labels: str) -> bool:
        return not await self.pods(namespace, labels)

    async def _established(self, name: str) -> bool:
        found = await self.client.get(CRDS, "", name)
        return found is not None and is_true(found, "Established")

    async def _set_node_ready(self, name: str, status: str) -> None:
        patch = {"status": {"conditions": [ready_condition(status)]}}
        await self.client.merge_patch(NODES, "", name, patch, subresource="status")


class FakeCluster(Cluster):
    """The double. `world` given: pods are local processes (`processes`), else they pretend (`simulated`).

    Leaving the block ends everything, and raises what went wrong in the double or in the tables that the test gave.
    """

    def __init__(self, folder: Path, *, world: ProcessWorld | None = None, timing: Timing | None = None) -> None:
        self.timing = timing or Timing()
        self.pod_template = {}
        self.server = KubeServer()
        self._folder, self._world = folder, world
        self._stack = contextlib.AsyncExitStack()
        self._runtime: SimulatedRuntime | ProcessRuntime | None = None

    @property
    def api(self) -> Api:
        """The API in this process, for what a test wants to see or do synchronously."""
        return self.server.api

    def kubeconfig_for(self, user: str, *, url: str = "") -> Path:
        return self.server.write_kubeconfig(self._folder / f"kubeconfig-{user}", user=user, url=url)

    def upstream(self) -> Upstream:
        return Upstream(self.server.url)

    @property
    def simulated(self) -> SimulatedRuntime:
        assert isinstance(self._runtime, SimulatedRuntime), "this cluster runs its pods as processes"
        return self._runtime

    @property
    def processes(self) -> ProcessRuntime:
        assert isinstance(self._runtime, ProcessRuntime), "this cluster's pods pretend: give it a world"
        return self._runtime

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.server)
            self.kubeconfig = self.server.write_kubeconfig(self._folder / "kubeconfig", user="test")
            self.client = await stack.enter_async_context(KubeHttp(self.kubeconfig))
            self._plane = ControlPlane(self.api, self.timing)
            stack.push_async_callback(_cancelled, asyncio.create_task(self._plane.run()))
            if self._world is None:
                self._runtime = SimulatedRuntime()
            else:
                self._runtime = ProcessRuntime(self.kubeconfig, self._folder / "pods", self._world, self.timing)
            self.kubelet = await stack.enter_async_context(Kubelet(self.kubeconfig, self._runtime, self.timing))
            self.api.pod_log = self._pod_log
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        if self.failures:
            raise ExceptionGroup("the test's cluster itself went wrong", self.failures)

    @property
    def failures(self) -> list[Exception]:
        return [*self.server.failures, *self._plane.failures, *self.kubelet.failures]

    async def lose_node(self, name: str) -> None:
        self.freeze_node(name)
        await self._set_node_ready(name, "Unknown")
        taints = [{"key": UNREACHABLE_TAINT, "effect": effect} for effect in ("NoSchedule", "NoExecute")]
        await self.client.merge_patch(NODES, "", name, {"spec": {"taints": taints}})

    async def heal_node(self, name: str) -> None:
        await super().heal_node(name)
        await self.client.merge_patch(NODES, "", name, {"spec": {"taints": []}})

    def _pod_log(self, pod: Object, container: str, previous: bool) -> str | None:
        metadata = pod["metadata"]
        return self.kubelet.log(metadata["namespace"], metadata["name"], container, previous=previous)


def _manifests(folder: Path) -> Objects:
    return [yaml.safe_load(file.read_text()) for file in sorted(folder.glob("*.yaml"))]


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
