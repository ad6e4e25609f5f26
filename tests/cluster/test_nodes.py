"""Nodes are lost, come back and are deleted: what was on them is made anew elsewhere at once, and nothing doubles."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest_asyncio
from antiphon_operator import names

from tests.cluster.faults import most_replicas, truthful
from tests.cluster.history import Object, World, label
from tests.cluster.stage import device
from tests.cluster.support import Desk
from tests.support.kube.resources import NODES, PODS

GANG = {"replicas": 1, "parallelism": {"tensor": 4}, "gpusPerPod": 2}


@dataclass(frozen=True, slots=True)
class Room:
    """Nodes with a device that only this test's Models want. What a pod asks for fills one node."""

    desk: Desk
    gpu: str
    nodes: tuple[str, ...]

    async def node_of(self, pod: Object) -> str:
        """Once it has one."""

        async def look() -> Object | None:
            return await self.desk.cluster.get(PODS, self.desk.namespace, pod["metadata"]["name"])

        found = await self.desk.eventually(
            look, lambda found: found is not None and found["spec"].get("nodeName"), what="it has a node"
        )
        assert found is not None
        return str(found["spec"]["nodeName"])

    async def terminating(self, model: str) -> list[Object]:
        return [pod for pod in await self.desk.all(PODS, model) if pod["metadata"].get("deletionTimestamp")]


@pytest_asyncio.fixture(loop_scope="session")
async def room(desk: Desk) -> AsyncIterator[Room]:
    gpu = device()
    nodes = tuple(f"{gpu.rpartition('/')[2]}-{letter}" for letter in "abc")
    for node in nodes:
        await desk.cluster.add_node(node, extended={gpu: 2})
    yield Room(desk, gpu, nodes)
    for node in nodes:
        if await desk.cluster.get(NODES, "", node) is not None:
            await desk.cluster.heal_node(node)
            await desk.cluster.delete_node(node)


async def test_a_replica_of_a_lost_node_is_replaced_at_once_and_its_pods_go_when_the_node_is_back(room: Room) -> None:
    desk = room.desk
    await desk.create(
        "qwen",
        accelerator={"resource": room.gpu},
        prefill={"parallelism": {"tensor": 2}, "gpusPerPod": 2},
        decode={"parallelism": {"tensor": 2}, "gpusPerPod": 2},
    )
    await desk.until_serving("qwen", prefill=1, decode=1)
    (old,), (prefill,) = await desk.pods("qwen", "decode"), await desk.pods("qwen", "prefill")
    since, lost = await desk.version(), await room.node_of(old)
    await desk.cluster.lose_node(lost)
    await desk.eventually(lambda: desk.replica_sets("qwen", "decode"), _other_than(old), what="another replica")
    model = await desk.until_serving("qwen", prefill=1, decode=1)
    assert model["status"]["phase"] == "Running"
    (new,) = await desk.pods("qwen", "decode")
    assert label(new, names.REPLICA_LABEL) != label(old, names.REPLICA_LABEL)
    assert await room.node_of(new) not in (lost, await room.node_of(prefill))
    # nobody can confirm the end of the old one, and nobody waits for it
    assert [pod["metadata"]["uid"] for pod in await room.terminating("qwen")] == [old["metadata"]["uid"]]
    await desk.cluster.heal_node(lost)
    await desk.eventually(lambda: room.terminating("qwen"), lambda pods: not pods, what="the old pods are gone")
    await desk.until_serving("qwen", prefill=1, decode=1)
    assert await desk.pod_uids("qwen") == {new["metadata"]["uid"], prefill["metadata"]["uid"]}
    await desk.always(_most(prefill=1, decode=1), since)
    await desk.always(lambda world: _pods_at_once(world, "decode", 2), since)
    await truthful(desk, "qwen", since)
    told = {world.condition("qwen", "Ready").get("status") for world in await desk.worlds(since)}
    assert told == {"True", "False"}, "meanwhile it was not Ready, and said so"


async def test_a_gang_with_one_member_on_a_lost_node_goes_whole(room: Room) -> None:
    desk = room.desk
    await desk.create("qwen", accelerator={"resource": room.gpu}, decode=GANG)
    await desk.until_serving("qwen", decode=1)
    old = await desk.pods("qwen")
    since, lost = await desk.version(), await room.node_of(old[1])
    assert await room.node_of(old[0]) != lost
    await desk.cluster.lose_node(lost)
    await desk.eventually(lambda: desk.replica_sets("qwen"), _other_than(old[0]), what="another gang")
    await desk.until_serving("qwen", decode=1)
    new = await desk.pods("qwen")
    assert not {pod["metadata"]["uid"] for pod in old} & {pod["metadata"]["uid"] for pod in new}
    assert lost not in {await room.node_of(pod) for pod in new}
    assert [pod["metadata"]["uid"] for pod in await room.terminating("qwen")] == [old[1]["metadata"]["uid"]]
    await desk.cluster.heal_node(lost)
    await desk.until_replicas("qwen", "decode", 1)
    await desk.always(_most(decode=1), since)
    await truthful(desk, "qwen", since)
    assert await desk.pod_uids("qwen") == {pod["metadata"]["uid"] for pod in new}


async def test_a_node_that_is_deleted_takes_its_pods_and_they_are_made_elsewhere(room: Room) -> None:
    desk = room.desk
    await desk.create(
        "qwen",
        accelerator={"resource": room.gpu},
        decode={"replicas": 2, "parallelism": {"tensor": 2}, "gpusPerPod": 2},
    )
    await desk.until_serving("qwen", decode=2)
    old, kept = await desk.pods("qwen")
    since, gone = await desk.version(), await room.node_of(old)
    await desk.cluster.delete_node(gone)
    await desk.eventually(
        lambda: desk.pod_uids("qwen"), lambda uids: old["metadata"]["uid"] not in uids, what="the old pod goes"
    )
    await desk.until_serving("qwen", decode=2)
    await desk.until_replicas("qwen", "decode", 2)
    assert kept["metadata"]["uid"] in await desk.pod_uids("qwen")
    assert gone not in {await room.node_of(pod) for pod in await desk.pods("qwen")}
    await desk.always(_most(decode=2), since)
    await truthful(desk, "qwen", since)


async def test_without_room_elsewhere_the_status_says_so_and_the_node_that_comes_back_is_used(room: Room) -> None:
    desk = room.desk
    await desk.create(
        "qwen",
        accelerator={"resource": room.gpu},
        decode={"replicas": 3, "parallelism": {"tensor": 2}, "gpusPerPod": 2},
    )
    await desk.until_serving("qwen", decode=3)
    (old, *_), since = await desk.pods("qwen"), await desk.version()
    lost = await room.node_of(old)
    await desk.cluster.lose_node(lost)
    model = await desk.until("qwen", "PoolsReady", "False", "InsufficientGpus", says=f"Insufficient {room.gpu}")
    assert model["status"]["pools"]["decode"]["ready"] == 2
    await desk.until("qwen", "Ready", "True")
    await desk.cluster.heal_node(lost)
    await desk.until_serving("qwen", decode=3)
    await desk.until_replicas("qwen", "decode", 3)
    assert lost in {await room.node_of(pod) for pod in await desk.pods("qwen")}
    assert old["metadata"]["uid"] not in await desk.pod_uids("qwen"), "a replica that was given up does not return"
    await desk.always(_most(decode=3), since)


def _most(**most: int) -> Callable[[World], str]:
    """The next one is made before the lost one is removed, which nobody can reach any more."""
    one_more = most_replicas("qwen", **{role: count + 1 for role, count in most.items()})

    def fault(world: World) -> str:
        ready = {role: sum(each.ready for each in world.replicas("qwen", role)) for role in most}
        return one_more(world) or ("" if all(ready[role] <= most[role] for role in most) else f"{ready} are ready")

    return fault


def _other_than(old: Object) -> Callable[[list[Object]], bool]:
    return lambda sets: (
        [label(each, names.REPLICA_LABEL) for each in sets]
        not in (
            [],
            [label(old, names.REPLICA_LABEL)],
        )
    )


def _pods_at_once(world: World, role: str, most: int) -> str:
    """With the one that nobody can confirm."""
    pods = [pod for pod in world.all("Pod", "qwen") if label(pod, names.ROLE_LABEL) == role]
    return "" if len(pods) <= most else f"there are {len(pods)} {role} pods"
