"""An operator that is to be hurt: alone with one namespace, behind a proxy that counts its requests and can kill it.

    async with a_victim(stage, tmp_path, "rollout") as victim:
        await victim.desk.create("qwen")
        async with victim.killed_when(PODS, lambda type, pod: is_ready(pod)) as dead:
            await victim.desk.edit("qwen", engine={"image": "worker:2"})
            await dead()
        await victim.revive()

A victim watches its own namespace only and has its own Lease, so several can suffer side by side. Whoever makes one
sees to it that the shared operator, which watches everything, has ended (`the_shared_one_ends`). Everything here goes
over HTTP and works before any API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon_operator import names

from tests.cluster.history import MODELS, POOLS, Change, Object, World, label, longest_s
from tests.cluster.stage import Stage, a_namespace
from tests.cluster.support import Desk
from tests.support.kube.fault_proxy import FaultProxy
from tests.support.kube.faults import NOTHING, Fault, Faults, Seen
from tests.support.kube.operator_process import LEASE_NAMESPACE, PATIENT, OperatorProcess
from tests.support.kube.resources import (
    JOBS,
    LEASES,
    NETWORK_POLICIES,
    POD_DISRUPTION_BUDGETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    STATEFULSETS,
    Resource,
)

TRUTH_S = 90.0
"""A status may say Ready while no pair is for as long as it takes to start the operator again, on a machine that is
busy; what it says for longer nobody would have mended."""
_WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_NOT_COUNTED = frozenset({"leases", "events"})
_STRIKE_WITHIN_S = 60.0


class Gate(Faults):
    """Faults that also count, and that can call somebody when the n-th writing request is at the door.

    Leases are spared by chance: API servers keep room for them apart from other requests, and an operator that loses
    its Lease ends, which is another test's matter.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.asked = 0
        """Requests of any kind."""
        self.writes: list[Seen] = []
        """Without Leases and Events."""
        self.written = 0
        """Writing requests of any kind, with Leases and Events."""
        self._countdown: tuple[int, Callable[[], None], Fault] | None = None

    def at_write(self, number: int, call: Callable[[], None], fault: Fault) -> None:
        """When the `number`-th write from now on comes: call, and do this to it."""
        self._countdown = (number, call, fault)

    def clear(self) -> None:
        super().clear()
        self._countdown = None

    def for_request(self, what: Seen) -> Fault:
        self.asked += 1
        self.written += what.verb in _WRITES
        if what.verb in _WRITES and what.resource not in _NOT_COUNTED:
            self.writes.append(what)
            if self._countdown is not None:
                left, call, fault = self._countdown
                self._countdown = None if left == 1 else (left - 1, call, fault)
                if left == 1:
                    call()
                    return fault
        return NOTHING if what.resource == "leases" else super().for_request(what)


@dataclass(frozen=True, slots=True)
class Victim:
    """See the module's docstring."""

    desk: Desk
    operator: OperatorProcess
    proxy: FaultProxy
    gate: Gate
    lease: str

    @contextlib.asynccontextmanager
    async def killed_when(
        self, resource: Resource, fits: Callable[[str, Object], bool]
    ) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """It is killed by the first change that fits (type and object) of those that come within the block. What is
        given waits for its end, and fails where none fitted."""
        since = await self.desk.version()
        listening = asyncio.Event()

        async def strike() -> None:
            listening.set()
            async for type_, thing in self.desk.cluster.client.changes(resource):
                metadata = thing["metadata"]
                new = int(metadata["resourceVersion"]) > since
                if metadata["namespace"] == self.desk.namespace and new and fits(type_, thing):
                    self.operator.kill()
                    return

        striking = asyncio.create_task(strike())

        async def dead() -> None:
            await asyncio.wait({striking}, timeout=_STRIKE_WITHIN_S)
            assert striking.done(), f"nothing of {resource.plural} fitted:\n{self.operator.last_lines(20)}"
            await striking
            await self.operator.ended()

        await listening.wait()
        try:
            yield dead
        finally:
            striking.cancel()
            await asyncio.wait({striking})

    def kill_at_write(self, number: int, *, carried_out: bool) -> None:
        """It dies when its `number`-th writing request from now on is on its way, which the API server gets or not.
        One that is carried out is cut off from its answer only, so what the server did is not known to anybody."""
        self.gate.at_write(number, self.operator.kill, Fault() if carried_out else Fault(disconnect=True))

    async def revive(self, *, until_acting: bool = True) -> None:
        """Start it again. Its old Lease is removed first: how long that would have held is another test's matter."""
        await self.operator.ended()
        await self.desk.cluster.client.delete(LEASES, LEASE_NAMESPACE, self.lease)
        await self.operator.restart()
        if until_acting:
            await self.operator.until_acting()


@contextlib.asynccontextmanager
async def a_victim(
    stage: Stage, folder: Path, called: str, *options: str, seed: int = 0, **known: Any
) -> AsyncIterator[Victim]:
    """Acting. `options` and `known` as of OperatorProcess."""
    namespace = await a_namespace(stage.cluster, called)
    async with a_victim_of(stage, folder, namespace, *PATIENT, *options, seed=seed, **known) as victim:
        await victim.operator.until_acting()
        models = []
        try:
            yield victim
        finally:
            for model in await victim.desk.all(MODELS):
                models.append(model["metadata"]["name"])
                await victim.desk.delete(models[-1])
        for name in models:
            await victim.desk.always(_two_of_one_id())
            await truthful(victim.desk, name)


@contextlib.asynccontextmanager
async def a_victim_of(
    stage: Stage, folder: Path, namespace: str, *options: str, name: str = "", seed: int = 0, **known: Any
) -> AsyncIterator[Victim]:
    """Of a namespace that is there, whose Models are somebody else's to tidy up; started."""
    name, gate = name or namespace, Gate(seed)
    async with FaultProxy(stage.cluster.upstream(), gate) as proxy:
        kubeconfig = stage.cluster.kubeconfig_for(name, url=proxy.url)
        words = ("--namespaces", namespace, "--lease-name", namespace)
        async with OperatorProcess(kubeconfig, folder, *words, *options, name=name, **known) as operator:
            desk = Desk(stage.cluster, operator, stage.history, namespace)
            yield Victim(desk, operator, proxy, gate, namespace)


async def the_shared_one_ends(stage: Stage) -> None:
    """The next test that asks for it starts it again."""
    if stage.operator.is_running:
        await stage.operator.stop()


# -- what must hold, whatever is done to an operator


async def truthful(desk: Desk, model: str, since: int = 0) -> None:
    """Ready=True never stood for long while there was no ready pair."""
    lied_s = longest_s(await desk.worlds(since), lambda world: says_ready_without_a_pair(world, model))
    assert lied_s < TRUTH_S, f"Model {model} said Ready for {lied_s:.1f} s without a ready pair"


def says_ready_without_a_pair(world: World, model: str) -> bool:
    """No revision has a ready replica in each of its pools."""
    if world.condition(model, "Ready").get("status") != "True":
        return False
    replicas = world.replicas(model)
    roles_of = {
        revision: {each.role for each in replicas if each.revision == revision}
        for revision in {each.revision for each in replicas}
    }
    return not any(
        all(any(each.ready and (each.role, each.revision) == (role, revision) for each in replicas) for role in roles)
        for revision, roles in roles_of.items()
        if "decode" in roles
    )


def _two_of_one_id() -> Callable[[World], str]:
    """No id is ever given to a second replica, of whatever pool or revision."""
    uids: dict[tuple[str, str], str] = {}

    def fault(world: World) -> str:
        change = world.change
        if change is None or change.kind != STATEFULSETS.kind:
            return ""
        thing = change.object
        key = (label(thing, names.MODEL_LABEL) + _owner_uid(thing), label(thing, names.REPLICA_LABEL))
        first = uids.setdefault(key, thing["metadata"]["uid"])
        return "" if first == thing["metadata"]["uid"] else f"the id {key[1]} was given twice"

    return fault


def _owner_uid(thing: Object) -> str:
    return str(next((owner["uid"] for owner in thing["metadata"].get("ownerReferences") or ()), ""))


async def drains_were_kept(desk: Desk, since: int) -> None:
    """Whoever was ready was marked before it went; nobody's drain began anew; none stands marked for ever."""
    marked: dict[str, str] = {}
    ready: set[str] = set()
    worlds = await desk.worlds(since)
    last: World | None = None
    for world in worlds:
        last = world
        for replica in (each for model in world.all("Model") for each in world.replicas(model["metadata"]["name"])):
            if replica.ready:
                ready.add(replica.name)
        _note(world.change, marked, ready)
    assert last is not None
    left = [each for model in last.all("Model") for each in last.replicas(model["metadata"]["name"]) if each.draining]
    assert not left, f"forgotten: {left}"


def _note(change: Change | None, marked: dict[str, str], ready: set[str]) -> None:
    if change is None or change.kind != STATEFULSETS.kind:
        return
    name = change.object["metadata"]["name"]
    since = (change.object["metadata"].get("annotations") or {}).get(names.DRAINING_SINCE_ANNOTATION, "")
    if change.type == "DELETED":
        assert name not in ready or name in marked, f"{name} was ready and went without being drained"
    elif since:
        assert marked.setdefault(name, since) == since, f"the drain of {name} began anew"


def most_replicas(model: str, **most: int) -> Callable[[World], str]:
    """Never more StatefulSets of a role than this."""

    def fault(world: World) -> str:
        counts = {role: len(world.replicas(model, role)) for role in most}
        return "" if all(counts[role] <= most[role] for role in most) else f"there are {counts}, at most {most} may be"

    return fault


def seconds_since(began_s: float) -> float:
    return round(time.monotonic() - began_s, 2)


def of_kind(things: Iterable[Object]) -> list[str]:
    return sorted(thing["metadata"]["name"] for thing in things)


async def end_state(desk: Desk, model: str) -> Object:
    """What a Model came to, without anything that a second run would have otherwise: ids, uids, times."""
    revisions = await desk.revisions(model)

    def plain(name: str) -> str:
        for number, revision in enumerate(revisions):
            name = name.replace(revision, f"revision-{number}")
        return name

    replicas = await desk.replica_sets(model)
    pods = await desk.pods(model)
    told = (await desk.cluster.get(MODELS, desk.namespace, model) or {}).get("status") or {}
    return {
        "children": {
            resource.plural: [plain(name) for name in of_kind(await desk.all(resource, model))]
            for resource in (POOLS, SERVICES, SERVICE_ACCOUNTS, POD_DISRUPTION_BUDGETS, NETWORK_POLICIES, JOBS)
        },
        "revisions": len(revisions),
        "replicas": sorted(_shape(each, plain) for each in replicas),
        "images": sorted({each["spec"]["containers"][0]["image"] for each in pods}),
        "pods": len(pods),
        "pools": told.get("pools"),
        "conditions": {each["type"]: (each["status"], each["reason"]) for each in told.get("conditions") or ()},
        "phase": told.get("phase"),
        "current": plain((told.get("revision") or {}).get("current", "")),
    }


def _shape(replica: Object, plain: Callable[[str], str]) -> str:
    marks = sorted(set(replica["metadata"]["annotations"]) & {names.DRAINING_SINCE_ANNOTATION, names.WHOLE_ANNOTATION})
    revision = plain(label(replica, names.REVISION_LABEL))
    return f"{label(replica, names.ROLE_LABEL)} of {revision}, {replica['spec']['replicas']} pods {marks}"
