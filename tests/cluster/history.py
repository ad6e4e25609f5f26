"""Everything that happened to the Models of a cluster and to what they are made of, in the order of the API server.

Each kind is watched by a stream of its own, and streams do not keep step with each other. But every change has a
resourceVersion, and those are numbers that the server counts up over all kinds. So changes are recorded as they come
and sorted afterwards: a test replays them one by one, and asks after each what was true at that moment. Nothing that
lasted for one change only escapes, however slow the test was to look.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from antiphon_operator import names
from antiphon_operator.kube import resources

from tests.support.kube.cluster import Cluster
from tests.support.kube.controllers.podinfo import is_ready
from tests.support.kube.resources import CONTROLLER_REVISIONS, JOBS, PODS, STATEFULSETS, Resource
from tests.support.kube_in_process import served

Object = dict[str, Any]
MODELS, POOLS = served(resources.MODELS), served(resources.POOLS)
WATCHED: tuple[Resource, ...] = (MODELS, POOLS, STATEFULSETS, PODS, CONTROLLER_REVISIONS, JOBS)

LONGEST_LIE_S = 30.0
"""A status may be behind the pods for so long, on a machine that is busy."""


@dataclass(frozen=True, slots=True)
class Change:
    """One event of one watch. `at_s`: when it came, by the monotonic clock."""

    version: int
    at_s: float
    type: str
    kind: str
    object: Object

    def __str__(self) -> str:
        return f"{self.type} {self.kind} {self.object['metadata']['name']} at version {self.version}"


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica at one moment."""

    name: str
    role: str
    revision: str
    draining: bool
    ready: bool
    """All its pods are there and ready."""
    pods: int


@dataclass
class World:
    """The objects of one namespace at one moment, by kind and name."""

    change: Change | None = None
    """The last one of those that led here."""
    objects: dict[str, dict[str, Object]] = field(default_factory=dict)

    def apply(self, change: Change) -> None:
        self.change = change
        of_kind = self.objects.setdefault(change.kind, {})
        name = change.object["metadata"]["name"]
        if change.type == "DELETED":
            of_kind.pop(name, None)
        else:
            of_kind[name] = change.object

    def all(self, kind: str, model: str = "") -> list[Object]:
        """In the order of their names."""
        found = self.objects.get(kind, {}).values()
        chosen = [thing for thing in found if not model or label(thing, names.MODEL_LABEL) == model]
        return sorted(chosen, key=lambda thing: str(thing["metadata"]["name"]))

    def model(self, name: str) -> Object | None:
        return self.objects.get("Model", {}).get(name)

    def condition(self, model: str, kind: str) -> Object:
        found = self.model(model)
        return {} if found is None else condition(found, kind)

    def replicas(self, model: str, role: str = "", revision: str = "") -> list[Replica]:
        """Those whose StatefulSet is not being deleted."""
        found = []
        for thing in self.all("StatefulSet", model):
            if thing["metadata"].get("deletionTimestamp"):
                continue
            replica = self._replica(thing)
            if role in ("", replica.role) and revision in ("", replica.revision):
                found.append(replica)
        return found

    def can_serve(self, model: str) -> bool:
        """A request could be answered by the pods of some revision: one of each pool that it has and that is not
        asleep is ready, and not on its way out."""
        ready: dict[str, set[str]] = {}
        for replica in self.replicas(model):
            roles = ready.setdefault(replica.revision, set())
            if replica.ready and not replica.draining:
                roles.add(replica.role)
        return any(self._roles(model, revision) <= roles for revision, roles in ready.items())

    def _roles(self, model: str, revision: str) -> set[str]:
        kept = self.objects.get("ControllerRevision", {}).get(names.revision_name(model, revision))
        roles = {"decode"} if kept is None else set(kept["data"]["pools"])
        prefill = self.objects.get("Pool", {}).get(names.pool_name(model, "prefill"))
        asleep = prefill is not None and prefill["spec"].get("replicas") == 0
        return roles - {"prefill"} if asleep else roles

    def _replica(self, thing: Object) -> Replica:
        uid = thing["metadata"]["uid"]
        pods = [pod for pod in self.all("Pod", label(thing, names.MODEL_LABEL)) if _owner(pod) == uid]
        standing = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
        return Replica(
            name=thing["metadata"]["name"],
            role=label(thing, names.ROLE_LABEL),
            revision=label(thing, names.REVISION_LABEL),
            draining=names.DRAINING_SINCE_ANNOTATION in (thing["metadata"].get("annotations") or {}),
            ready=len(standing) == thing["spec"]["replicas"] and all(map(is_ready, standing)),
            pods=len(pods),
        )


class History:
    """`async with History.of(cluster) as history:` records until the end of the block."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._changes: list[Change] = []
        self._known: dict[str, int] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, cluster: Cluster) -> AsyncIterator[History]:
        history = cls(cluster)
        tasks = [asyncio.create_task(history._follow(resource), name=resource.plural) for resource in WATCHED]
        try:
            yield history
            failed = [task for task in tasks if task.done()]
            for task in failed:
                await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def until_now(self) -> None:
        """Wait for all streams to have told what is there at this moment."""
        for resource in WATCHED:
            listed = await self._cluster.list(resource)
            await self._cluster.eventually(
                functools.partial(self._has_all, listed), what=f"the watch of {resource.plural} tells what a list told"
            )

    async def changes(self, namespace: str, since: int = 0) -> list[Change]:
        """Of one namespace, in order, of the versions after `since`."""
        await self.until_now()
        found = [
            change
            for change in self._changes
            if change.version > since and change.object["metadata"].get("namespace") == namespace
        ]
        return sorted(found, key=lambda change: change.version)

    async def worlds(self, namespace: str, since: int = 0) -> Iterator[World]:
        """The namespace after each change. It is one object, moved on: look at it before you ask for the next."""
        return _replayed(await self.changes(namespace), since)

    async def version(self) -> int:
        """Of the newest change that is known now: where a later replay may begin."""
        await self.until_now()
        return max((change.version for change in self._changes), default=0)

    def _has_all(self, things: Iterable[Object]) -> bool:
        """All of them, as they are or as they became since."""
        return all(
            self._known.get(thing["metadata"]["uid"], 0) >= int(thing["metadata"]["resourceVersion"])
            for thing in things
        )

    async def _follow(self, resource: Resource) -> None:
        async for event in self._cluster.client.changes(resource):
            metadata = event.value["metadata"]
            version = int(metadata["resourceVersion"])
            if event.type != "DELETED" and self._known.get(metadata["uid"]) == version:
                continue  # told again by a new list
            self._known[metadata["uid"]] = max(version, self._known.get(metadata["uid"], 0))
            self._changes.append(Change(version, time.monotonic(), event.type, resource.kind, event.value))


def _replayed(changes: Iterable[Change], since: int) -> Iterator[World]:
    world = World()
    for change in changes:
        world.apply(change)
        if change.version > since:
            yield world


def longest_s(worlds: Iterable[World], holds: Callable[[World], bool]) -> float:
    """For how long at a stretch something was so, by the times when changes came."""
    longest, began_at_s = 0.0, None
    for world in worlds:
        assert world.change is not None
        at_s = world.change.at_s
        if began_at_s is not None:
            longest = max(longest, at_s - began_at_s)
        if not holds(world):
            began_at_s = None
        elif began_at_s is None:
            began_at_s = at_s
    return longest


def longest_lies_s(worlds: Iterable[World]) -> dict[str, float]:
    """By Model: for how long at a stretch it was said to be Ready while no request could be answered, by the times
    when changes came."""
    longest: dict[str, float] = {}
    began_at_s: dict[str, float] = {}
    for world in worlds:
        change = world.change
        assert change is not None
        name = change.object["metadata"]["name"] if change.kind == "Model" else label(change.object, names.MODEL_LABEL)
        if name in began_at_s:
            longest[name] = max(longest.get(name, 0.0), change.at_s - began_at_s[name])
        if world.condition(name, "Ready").get("status") != "True" or world.can_serve(name):
            began_at_s.pop(name, None)
        else:
            began_at_s.setdefault(name, change.at_s)
    now_s = time.monotonic()
    for name, at_s in began_at_s.items():
        longest[name] = max(longest.get(name, 0.0), now_s - at_s)
    return longest


def condition(thing: Mapping[str, Any], kind: str) -> Object:
    """Of its status; empty where there is none."""
    told = (thing.get("status") or {}).get("conditions") or ()
    return next((each for each in told if each["type"] == kind), {})


def label(thing: Mapping[str, Any], name: str) -> str:
    return str((thing["metadata"].get("labels") or {}).get(name, ""))


def _owner(thing: Mapping[str, Any]) -> str:
    owners = thing["metadata"].get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")
