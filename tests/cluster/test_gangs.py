"""A replica of several pods is all or nothing."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable

from antiphon_operator import names

from tests.cluster.history import Object, World, label
from tests.cluster.stage import device
from tests.cluster.support import SHORT_DEADLINE, Desk, message
from tests.support.kube.kubelets.simulated import Script
from tests.support.kube.resources import SECRETS

GANG = {"replicas": 1, "parallelism": {"tensor": 8}, "gpusPerPod": 2}
PODS_OF_A_GANG = 4
BACK_OFF_DEADLINE_S = 100.0
"""Start, the shortest deadline, and the first back-off."""


async def test_a_gang_comes_up_whole_or_is_taken_down_and_tried_again(desk: Desk) -> None:
    """Three gangs at once, as each has to wait: one that finds too few devices, one with a member that never gets
    ready, and one that loses a member after it was ready."""
    few, enough = device(), device()
    await desk.cluster.add_node(few.rpartition("/")[2], extended={few: 6})
    await desk.cluster.add_node(enough.rpartition("/")[2], extended={enough: 64})
    cured = asyncio.Event()
    desk.script(lambda pod, container: Script(ready_s=None) if _is_sick(pod) and not cured.is_set() else None)
    rollout = {"progressDeadline": SHORT_DEADLINE}
    await asyncio.gather(
        desk.create("few", decode=GANG, accelerator={"resource": few}, rollout=rollout),
        desk.create("stuck", decode=GANG, accelerator={"resource": enough}, rollout=rollout),
        desk.create("broken", decode=GANG, accelerator={"resource": enough}, rollout=rollout),
    )
    await asyncio.gather(_finds_devices(desk, few), _gets_well(desk, cured), _loses_a_member(desk))
    for name in ("few", "stuck", "broken"):
        await desk.always(functools.partial(_not_all_or_nothing, name))
        assert len(_ids_ever(await desk.worlds(), name)) == 2, "it was made anew once, under another id"


async def _finds_devices(desk: Desk, gpu: str) -> None:
    model = await desk.until("few", "Ready", "False", "InsufficientGpus", says=f"Insufficient {gpu}")
    assert model["status"]["pools"]["decode"]["gpus"] == 8
    await _backs_off(desk, "few", says="3 of 4 pods were ready in time")
    await desk.cluster.add_node(device().rpartition("/")[2], extended={gpu: 2})
    await desk.until_serving("few", decode=1, deadline_s=BACK_OFF_DEADLINE_S)


async def _gets_well(desk: Desk, cured: asyncio.Event) -> None:
    await _backs_off(desk, "stuck", says="3 of 4 pods were ready in time")
    cured.set()
    await desk.until_serving("stuck", decode=1, deadline_s=BACK_OFF_DEADLINE_S)


async def _loses_a_member(desk: Desk) -> None:
    await desk.until_serving("broken", decode=1)
    pods = await desk.pods("broken")
    assert len(pods) == PODS_OF_A_GANG
    desk.cluster.simulated.crash(desk.namespace, pods[2]["metadata"]["name"], line="NCCL")  # type: ignore[attr-defined]
    await _backs_off(desk, "broken", says="a member ended or was replaced")
    await desk.until_serving("broken", decode=1, deadline_s=BACK_OFF_DEADLINE_S)
    assert not {pod["metadata"]["uid"] for pod in pods} & await desk.pod_uids("broken")


async def _backs_off(desk: Desk, name: str, *, says: str) -> None:
    """It is taken down whole, the Pool counts the failure, and the next try has a time."""
    event = await desk.eventually(
        lambda: desk.events(name, "GangIncomplete"), what=f"{name} is taken down", deadline_s=BACK_OFF_DEADLINE_S
    )
    assert says in event[0]["message"]
    waiting = await desk.until(name, "PoolsReady", "False", "BackingOff", says="1 gangs failed in a row")
    assert "the next is made at" in message(waiting, "PoolsReady")
    pool = await desk.pool(f"{name}-decode")
    assert pool["status"]["failures"] == 1
    assert pool["status"]["nextAttemptAt"]
    await desk.until_replicas(name, "decode", 0)


def _is_sick(pod: Object) -> bool:
    """The third member of the gangs of `stuck`."""
    return label(pod, names.MODEL_LABEL) == "stuck" and str(pod["metadata"]["name"]).endswith("-2")


def _not_all_or_nothing(name: str, world: World) -> str:
    gangs = world.replicas(name)
    if len(gangs) > 1:
        return f"there are {len(gangs)} gangs"
    if world.condition(name, "Ready").get("status") == "True" and world.change is not None:
        whole = any(gang.ready for gang in gangs)
        # the status follows the pods; what must not be is that it runs ahead of them
        if not whole and world.change.kind == "Model":
            return "Ready was said of a gang that is not whole"
    return ""


def _ids_ever(worlds: Iterable[World], name: str) -> set[str]:
    return {replica.name for world in worlds for replica in world.replicas(name)}


async def test_a_gang_without_a_place_for_its_ranks_says_which_stage_lacks_what_until_there_is_one(desk: Desk) -> None:
    gpu = device()
    await desk.cluster.add_node(gpu.rpartition("/")[2], extended={gpu: 8})
    found = asyncio.Event()
    words = "GangUnschedulable: stage 0 needs 8 GPU on one node; the node with most has 2 free of 2"
    nowhere = Script(end_s=0.05, ready_s=None, exit_code=4, message=words, log=(words,))
    desk.script(
        lambda pod, container: nowhere if pod["metadata"]["name"].endswith("-0") and not found.is_set() else None
    )
    await desk.create("nowhere", decode=GANG, accelerator={"resource": gpu})
    for kind in ("PoolsReady", "Ready"):
        await desk.until("nowhere", kind, "False", "GangUnschedulable", says="stage 0 needs 8 GPU on one node")
    assert "nowhere-ray" in {one["metadata"]["name"] for one in await desk.cluster.list(SECRETS, desk.namespace)}
    found.set()
    await desk.until_serving("nowhere", decode=1, deadline_s=BACK_OFF_DEADLINE_S)
