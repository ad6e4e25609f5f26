"""What a measurement plays on: the double of a cluster in this process, one watcher under test in a process of its own.

API server, controllers, scheduler and kubelets of the double share this process's event loop with the driver; pods
pretend and are ready in some tens of milliseconds, and their status pages are a process beside it. The watcher under
test (the operator, or the bare one) talks to it over HTTP. What it costs is read off its process and off the double's
record of its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon_operator import names

from tests.support.kube.cluster import FakeCluster
from tests.support.kube.controllers.podinfo import is_ready, is_true
from tests.support.kube.kubelets.simulated import SimulatedRuntime
from tests.support.kube.requests import MUTATING
from tests.support.kube.resources import PODS, Resource
from tests.support.kube.store import Change

Object = dict[str, Any]
MODELS = Resource(names.GROUP, "v1alpha1", "models", "Model", True)
USER = "under-test"
"""Who the watcher under test is to the API server."""
PODS_PER_NODE = 100
NAMESPACES = 10
POLL_S = 0.02
REST_S = 3.0
"""Without a write, and it counts as settled."""
DEADLINE_S = 300.0
_MIB = 1024


class View:
    """How the Models and pods stand, kept up to date from the double's store itself."""

    def __init__(self) -> None:
        self.models: dict[str, Object] = {}
        self.serving: set[str] = set()
        """Ready, rolled out, and about the newest generation."""
        self.served_at: dict[str, float] = {}
        self.pods: dict[str, Object] = {}
        self.ready_pods: set[str] = set()
        self.status_writes = 0
        """Of Models, that changed something."""

    def see(self, change: Change) -> None:
        if change.resource == MODELS:
            self._see_model(change)
        elif change.resource == PODS:
            uid = change.value["metadata"]["uid"]
            if change.type == "DELETED":
                self.pods.pop(uid, None)
            else:
                self.pods[uid] = change.value
            ready = change.type != "DELETED" and is_ready(change.value)
            (self.ready_pods.add if ready else self.ready_pods.discard)(uid)

    def _see_model(self, change: Change) -> None:
        model, metadata = change.value, change.value["metadata"]
        key = f"{metadata['namespace']}/{metadata['name']}"
        self.models[key] = model
        if change.before is not None and change.before.get("status") != model.get("status"):
            self.status_writes += 1
        status = model.get("status") or {}
        current = status.get("observedGeneration") == metadata["generation"]
        complete = is_true(model, "RolloutComplete") or len(status.get("conditions") or ()) == 1
        if current and complete and is_true(model, "Ready"):
            if key not in self.serving:
                self.served_at[key] = time.perf_counter()
            self.serving.add(key)
        else:
            self.serving.discard(key)


@dataclass(slots=True)
class Stage:
    """`since` marks a moment in the record of requests."""

    cluster: FakeCluster
    view: View = field(default_factory=View)

    def mark(self) -> int:
        return self.cluster.server.requests.total

    def calls(self, since: int) -> Counter[str]:
        """Requests of the watcher under test: `patch pods/status` -> how many."""
        return Counter(
            f"{each.verb} {each.resource}{'/' if each.subresource else ''}{each.subresource}"
            for each in self.cluster.server.requests.since(since)
            if each.user == USER
        )

    def writes(self, since: int) -> int:
        """Without those about the Lease."""
        asked = self.cluster.server.requests.since(since)
        return sum(each.verb in MUTATING and each.resource != "leases" and each.user == USER for each in asked)

    async def until(self, holds: Callable[[], bool], what: str) -> float:
        """The moment when it held, on `perf_counter`."""
        ends_at = time.perf_counter() + DEADLINE_S
        while not holds():
            if time.perf_counter() > ends_at:
                raise TimeoutError(f"not in {DEADLINE_S:g} s: {what}")
            if failures := self.cluster.failures:
                raise ExceptionGroup("the double itself went wrong", failures)
            await asyncio.sleep(POLL_S)
        return time.perf_counter()

    async def settled(self, since: int) -> float:
        """The moment of the last write, once none has come for `REST_S`."""
        writes, last_at = self.writes(since), time.perf_counter()
        while time.perf_counter() - last_at < REST_S:
            await asyncio.sleep(0.1)
            if (now := self.writes(since)) != writes:
                writes, last_at = now, time.perf_counter()
        return last_at


@contextlib.asynccontextmanager
async def a_stage(folder: Path, models: int) -> AsyncIterator[Stage]:
    """In an existing folder; with room for twice the pods of so many Models."""
    async with FakeCluster(folder) as cluster, _worker_pages(cluster.simulated):
        cluster.server.requests.recent = deque()
        for number in range(1 + models * 4 // PODS_PER_NODE):
            await cluster.add_node(f"node-{number}", cpu="512", memory="4Ti")
        await cluster.install_crds()
        for number in range(NAMESPACES):
            await cluster.namespace(namespace(number))
        stage = Stage(cluster)
        cluster.api.store.subscribe(stage.view.see)
        yield stage


def namespace(number: int) -> str:
    return f"team-{number % NAMESPACES}"


@contextlib.asynccontextmanager
async def _worker_pages(runtime: SimulatedRuntime) -> AsyncIterator[None]:
    """All pods get one loopback address, where one page answers for each of them."""
    address = ".".join(("127", *(str(random.randint(1, 254)) for _ in range(3))))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.operator.pages", address, str(names.STATUS_PORT)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            if not await process.stdout.readline():
                raise RuntimeError("the workers' pages do not listen; what they wrote to the standard error says why")
        runtime.addresses = itertools.repeat(address)
        yield
    finally:
        process.stdin.close()
        await process.wait()


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process, until now."""

    cpu_s: float
    rss_mib: float
    peak_rss_mib: float

    @classmethod
    def of(cls, pid: int) -> Usage:
        """CPU time of all threads, user and system, by the kernel's clock of another process."""
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        rss, peak = (int(lines[name].split()[0]) / _MIB for name in ("VmRSS", "VmHWM"))
        return cls(time.clock_gettime((~pid << 3) | 2), rss, peak)
