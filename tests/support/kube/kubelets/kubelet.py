"""The kubelet of some nodes, over HTTP: it watches pods, gives each on its nodes a worker, and ends with all of them.

One kubelet plays any number of nodes. It is told by the test which of them are lost: a frozen node writes nothing,
starts nothing, confirms no deletion.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import aiohttp

from tests.support.kube.controllers.timing import Timing
from tests.support.kube.kubelets.client import KubeHttp, Refused
from tests.support.kube.kubelets.node import Node, NodeShape
from tests.support.kube.kubelets.pod_worker import PodWorker
from tests.support.kube.kubelets.runtime import Runtime
from tests.support.kube.resources import LEASES, NODES, PODS

Object = dict[str, Any]
LEASE_NAMESPACE = "kube-node-lease"
HEARTBEAT_S = 10.0
LEASE_S = 40
RETRY_S = 0.05


class Kubelet:
    """`async with Kubelet(kubeconfig, runtime) as kubelet:`

    `heartbeats`: renew the nodes' leases, as a real control plane expects. `failures` is what went wrong in the double
    or in what the test gave it; empty in a good run.
    """

    def __init__(
        self,
        kubeconfig: Path,
        runtime: Runtime,
        timing: Timing,
        *,
        heartbeats: bool = False,
    ) -> None:
        self.failures: list[Exception] = []
        self.client = KubeHttp(kubeconfig)
        self._runtime, self._timing, self._heartbeats = runtime, timing, heartbeats
        self._nodes: dict[str, Node] = {}
        self._workers: dict[str, PodWorker] = {}
        self._by_name: dict[tuple[str, str], PodWorker] = {}
        """Also of pods that are gone, for their logs."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._own: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        await self._runtime.open()
        self._own.append(asyncio.create_task(self._watch()))
        if self._heartbeats:
            self._own.append(asyncio.create_task(self._beat()))
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._own, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._runtime.close()
        await self.client.__aexit__()

    async def add_node(self, shape: NodeShape) -> Node:
        manifest = shape.manifest()
        node = self._nodes[shape.name] = Node(shape)  # first: pods may be bound to it at once
        if self._heartbeats:
            await self._renew(shape.name)
        await self.client.create(NODES, "", manifest)
        await self.client.merge_patch(NODES, "", shape.name, {"status": manifest["status"]}, subresource="status")
        return node

    def freeze(self, name: str) -> None:
        self._nodes[name].awake.clear()
        for worker in self._on(name):
            self._runtime.freeze(worker.uid)

    def thaw(self, name: str) -> None:
        for worker in self._on(name):
            self._runtime.thaw(worker.uid)
            worker.rewrite()
        self._nodes[name].awake.set()

    def forget_node(self, name: str) -> None:
        """The machine is gone for good, and its pods with it."""
        for worker in self._on(name):
            self._tasks[worker.uid].cancel()
        del self._nodes[name]

    def log(self, namespace: str, pod: str, container: str = "", *, previous: bool = False) -> str | None:
        """What the container said; None where there is none. Also of a pod that is gone. No `container`: its first."""
        worker = self._by_name.get((namespace, pod))
        if worker is None or worker.sandbox is None:
            return None
        return worker.sandbox.log(container or worker.pod["spec"]["containers"][0]["name"], previous=previous)

    def _on(self, node: str) -> list[PodWorker]:
        return [worker for worker in self._workers.values() if worker.node.shape.name == node]

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(Refused, aiohttp.ClientError, TimeoutError):
                async for event in self.client.changes(PODS):
                    self._see(event.type, event.value)
            await asyncio.sleep(RETRY_S)

    def _see(self, kind: str, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        worker = self._workers.get(uid)
        if kind == "DELETED":
            if worker is not None:
                worker.gone()
        elif worker is not None:
            worker.observe(pod)
        elif (node := self._nodes.get(pod["spec"].get("nodeName", ""))) is not None and uid not in self._tasks:
            worker = PodWorker(self.client, node, self._runtime, self._timing, pod, self.failures.append)
            self._workers[uid] = worker
            self._by_name[pod["metadata"]["namespace"], pod["metadata"]["name"]] = worker
            self._tasks[uid] = asyncio.create_task(worker.run())
            self._tasks[uid].add_done_callback(lambda task: self._ended(uid, task))

    def _ended(self, uid: str, task: asyncio.Task[None]) -> None:
        del self._workers[uid]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def _beat(self) -> None:
        while True:
            for name, node in list(self._nodes.items()):
                if node.awake.is_set():
                    with contextlib.suppress(Refused, aiohttp.ClientError, TimeoutError):
                        await self._renew(name)
            await asyncio.sleep(HEARTBEAT_S)

    async def _renew(self, node: str) -> None:
        spec: Mapping[str, Any] = {
            "holderIdentity": node,
            "leaseDurationSeconds": LEASE_S,
            "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        try:
            await self.client.merge_patch(LEASES, LEASE_NAMESPACE, node, {"spec": spec})
        except Refused as refusal:
            if refusal.status != 404:
                raise
            body = {
                "apiVersion": LEASES.api_version,
                "kind": LEASES.kind,
                "metadata": {"name": node, "namespace": LEASE_NAMESPACE},
                "spec": spec,
            }
            await self.client.create(LEASES, LEASE_NAMESPACE, body)
