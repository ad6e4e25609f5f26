"""One pod on its node, from its binding to its end: the part of a kubelet that does not care what runs the containers.

Two tasks: one lives the pod's life (sandbox, init containers in order, containers with restarts and back-off), one
writes the status whenever it has changed. When the pod is deleted, the first is cancelled, its runs are stopped within
the grace, and the deletion is confirmed. While the node is frozen nothing is written and nothing is begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from tests.support.kube.controllers import clock
from tests.support.kube.controllers.events import event_body
from tests.support.kube.controllers.timing import Timing
from tests.support.kube.kubelets.client import KubeHttp, Refused
from tests.support.kube.kubelets.node import Node
from tests.support.kube.kubelets.runtime import ImageMissing, NotYet, Run, Runtime, Sandbox, TestFault
from tests.support.kube.kubelets.status import ContainerRecord, Exit, pod_status
from tests.support.kube.resources import EVENTS, PODS

Object = dict[str, Any]
BACK_OFF_S = 10.0
MAX_BACK_OFF_S = 300.0
FORGET_AFTER_S = 600.0
"""A run of this length makes the next back-off the first again. All three are scaled."""
RETRY_S = 0.05
DEFAULT_GRACE_S = 30
KILL_GRACE_S = 1.0
"""For a pod that was deleted by force."""


class PodWorker:
    """`on_fault` hears of what only the test can put right. Such a pod starts nothing and says why."""

    def __init__(
        self,
        client: KubeHttp,
        node: Node,
        runtime: Runtime,
        timing: Timing,
        pod: Object,
        on_fault: Callable[[TestFault], None],
    ) -> None:
        self.sandbox: Sandbox | None = None
        self._on_fault = on_fault
        self._client, self._node, self._runtime, self._timing = client, node, runtime, timing
        self._pod = pod
        self._name, self._namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        self._uid = pod["metadata"]["uid"]
        spec = pod["spec"]
        self._policy: str = spec.get("restartPolicy", "Always")
        self._initialising = [_record(each) for each in spec.get("initContainers") or ()]
        self._containers = [_record(each) for each in spec["containers"]]
        self._runs: dict[str, Run] = {}
        self._started_at = clock.now()
        self._written: Object | None = None
        self._changed = asyncio.Event()
        self._to_end = asyncio.Event()
        self._gone = False
        if pod["metadata"].get("deletionTimestamp"):
            self._to_end.set()

    @property
    def uid(self) -> str:
        return str(self._uid)

    @property
    def pod(self) -> Object:
        return self._pod

    @property
    def node(self) -> Node:
        return self._node

    def observe(self, pod: Object) -> None:
        """The pod as it is now."""
        self._pod = pod
        if pod["metadata"].get("deletionTimestamp"):
            self._to_end.set()

    def gone(self) -> None:
        """The object is no longer there."""
        self._gone = True
        self._to_end.set()

    def rewrite(self) -> None:
        """The node is heard of again: what others wrote of the pod meanwhile is put right."""
        self._written = None
        self._changed.set()

    async def run(self) -> None:
        """Until the pod is gone, or cancelled; whichever, nothing of it runs afterwards."""
        writer = asyncio.create_task(self._write_changes())
        life = asyncio.create_task(self._live())
        ending = asyncio.create_task(self._to_end.wait())
        try:
            await asyncio.wait({life, ending}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                await life
            await ending
            await self._node.awake.wait()
            await _cancelled(life)
            await self._end()
            await _cancelled(writer)
            if not self._gone:
                await self._confirm()
        finally:
            for task in (writer, life, ending):
                await _cancelled(task)
            if self.sandbox is not None:
                await self.sandbox.close()

    # -- the pod's life

    async def _live(self) -> None:
        self._changed.set()
        self.sandbox = await self._made_sandbox()
        self._changed.set()
        spec = self._pod["spec"]
        for container, record in zip(spec.get("initContainers") or (), self._initialising, strict=True):
            policy = "Never" if self._policy == "Never" else "OnFailure"
            how = await self._keep(container, record, policy)
            if how.code:
                return
        async with asyncio.TaskGroup() as group:
            for container, record in zip(spec["containers"], self._containers, strict=True):
                group.create_task(self._keep(container, record, self._policy))

    async def _made_sandbox(self) -> Sandbox:
        told = ""
        while True:
            await self._node.awake.wait()
            try:
                return await self._runtime.sandbox(self._pod)
            except TestFault as fault:
                self._on_fault(fault)
                for record in (*self._initialising, *self._containers):
                    record.wait("CreateContainerError", str(fault))
                self._changed.set()
                await asyncio.Event().wait()
            except NotYet as why:
                if why.message != told:
                    told = why.message
                    await self._tell("Warning", why.reason, told)
                await asyncio.sleep(RETRY_S)

    async def _keep(self, container: Object, record: ContainerRecord, policy: str) -> Exit:
        """Run it, again where the policy says so. Returns how it ended for good."""
        crashes = 0
        while True:
            run = await self._begun(container, record)
            began_s = time.monotonic()
            how = await self._watched(run, record)
            record.end(how)
            self._changed.set()
            if policy == "Never" or (policy == "OnFailure" and how.code == 0):
                return how
            if time.monotonic() - began_s > self._timing.seconds(FORGET_AFTER_S):
                crashes = 0
            if crashes:
                await self._back_off(record, crashes)
            crashes += 1
            record.remember()
            record.restarts += 1

    async def _back_off(self, record: ContainerRecord, crashes: int) -> None:
        seconds = min(BACK_OFF_S * 2.0 ** (crashes - 1), MAX_BACK_OFF_S)
        record.remember()
        what = f"restarting failed container={record.name} pod={self._name}_{self._namespace}({self._uid})"
        record.wait("CrashLoopBackOff", f"back-off {_minutes(seconds)} {what}")
        self._changed.set()
        await self._tell("Warning", "BackOff", f"Back-off {what}")
        await asyncio.sleep(self._timing.seconds(seconds))

    async def _begun(self, container: Object, record: ContainerRecord) -> Run:
        assert self.sandbox is not None
        pulls = 0
        while True:
            await self._node.awake.wait()
            try:
                run = await self.sandbox.start(container)
            except ImageMissing as why:
                await self._pull_failed(record, str(why), pulls)
                pulls += 1
            except TestFault as fault:
                self._on_fault(fault)
                record.wait("CreateContainerError", str(fault))
                self._changed.set()
                await asyncio.Event().wait()
            except NotYet as why:
                record.wait(why.reason, why.message)
                self._changed.set()
                await asyncio.sleep(RETRY_S)
            else:
                self._runs[record.name] = run
                record.run(run.container_id)
                self._changed.set()
                return run

    async def _pull_failed(self, record: ContainerRecord, message: str, pulls: int) -> None:
        record.wait("ErrImagePull", message)
        self._changed.set()
        await self._tell("Warning", "Failed", f'Failed to pull image "{record.image}": {message}')
        await asyncio.sleep(RETRY_S)
        record.wait("ImagePullBackOff", f'Back-off pulling image "{record.image}": ErrImagePull: {message}')
        self._changed.set()
        await asyncio.sleep(self._timing.seconds(min(BACK_OFF_S * 2.0**pulls, MAX_BACK_OFF_S)))

    async def _watched(self, run: Run, record: ContainerRecord) -> Exit:
        """Until it has ended, by itself or because a probe says that it has to."""
        ended = asyncio.create_task(run.ended())
        health = asyncio.create_task(self._follow(run, record))
        try:
            await asyncio.wait({ended, health}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                reason = await health
                await self._tell("Warning", "Unhealthy", f"{reason} probe failed; container {record.name} is restarted")
                await run.stop(self._grace_s)
            return await ended
        finally:
            await _cancelled(health)
            await _cancelled(ended)

    async def _follow(self, run: Run, record: ContainerRecord) -> str:
        """Returns the probe that asks for a restart."""
        async with contextlib.aclosing(run.health()) as told:
            async for health in told:
                if health.failed:
                    return health.failed
                if (record.started, record.ready) != (health.started, health.ready):
                    record.started, record.ready = health.started, health.ready
                    self._changed.set()
        raise RuntimeError("a runtime's health must not end by itself")

    # -- its end

    @property
    def _grace_s(self) -> float:
        metadata, spec = self._pod["metadata"], self._pod["spec"]
        given = metadata.get("deletionGracePeriodSeconds", spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S))
        return KILL_GRACE_S if self._gone else float(given)

    async def _end(self) -> None:
        async with asyncio.TaskGroup() as group:
            for record in (*self._initialising, *self._containers):
                if record.running_since:
                    group.create_task(self._stopped(record))

    async def _stopped(self, record: ContainerRecord) -> None:
        run = self._runs[record.name]
        await run.stop(self._grace_s)
        record.end(await run.ended())

    async def _confirm(self) -> None:
        """Tell how it ended, then remove the object."""
        await self._node.awake.wait()
        await self._write()
        while True:
            try:
                await self._client.delete(PODS, self._namespace, self._name, uid=self._uid, grace_s=0)
            except (Refused, aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(RETRY_S)
            else:
                return

    # -- what is told

    async def _write_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._node.awake.wait()
            if not await self._write():
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    async def _write(self) -> bool:
        """False: to be tried again."""
        status = pod_status(
            self._pod,
            before=self._written or self._pod.get("status") or {},
            address="" if self.sandbox is None else self.sandbox.address,
            host_address=self._node.shape.address,
            started_at=self._started_at,
            initialising=self._initialising,
            containers=self._containers,
        )
        if status == self._written or self._gone:
            return True
        body = {"metadata": {"uid": self._uid}, "status": status}
        try:
            await self._client.merge_patch(PODS, self._namespace, self._name, body, subresource="status")
        except Refused as refusal:
            if refusal.status == 404:
                self.gone()
            return refusal.status == 404
        except (aiohttp.ClientError, TimeoutError):
            return False
        self._written = status
        return True

    async def _tell(self, kind: str, reason: str, message: str) -> None:
        """An Event; one that is there already, or cannot be written, is not worth a second try."""
        body = event_body(self._pod, kind=kind, reason=reason, message=message, component="kubelet")
        try:
            await self._client.create(EVENTS, self._namespace, body)
        except (Refused, aiohttp.ClientError, TimeoutError):
            return


def _record(container: Object) -> ContainerRecord:
    return ContainerRecord(name=container["name"], image=container.get("image", ""))


def _minutes(seconds: float) -> str:
    """As Go writes a duration."""
    whole = int(seconds)
    return f"{whole // 60}m{whole % 60}s" if whole >= 60 else f"{whole}s"


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancelled and ended; what it raised was somebody else's to see."""
    task.cancel()
    await asyncio.wait({task})
