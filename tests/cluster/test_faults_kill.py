"""The operator is killed in the middle of everything it does, and the next one ends where nobody was killed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from antiphon_operator import names

from tests.cluster.faults import Victim, a_victim, drains_were_kept, end_state, most_replicas, the_shared_one_ends
from tests.cluster.history import MODELS, POOLS, Object, World
from tests.cluster.rollouts import PairedRollout
from tests.cluster.stage import Stage, device
from tests.cluster.support import SHORT_DEADLINE, Desk
from tests.support.kube.controllers.podinfo import is_ready
from tests.support.kube.resources import CONTROLLER_REVISIONS, PODS, SERVICES, STATEFULSETS, Resource

Fits = Callable[[str, Object], bool]
PAIRS = {"prefill": 1, "decode": 1}
TWO_PAIRS = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
AT_ONCE = 3
LONG_DEADLINE_S = 100.0
"""For the shortest deadline of a step, and a gang's back-off."""


@dataclass(frozen=True)
class Scene:
    """Something that the operator does. `before` stands when it begins; `end` waits for it to be done."""

    act: Callable[[Desk], Coroutine[Any, Any, Any]]
    end: Callable[[Desk], Coroutine[Any, Any, Any]]
    before: Callable[[Desk], Coroutine[Any, Any, Any]] | None = None
    always: Callable[[World], str] | None = None
    """Empty at each moment of it."""
    points: Mapping[str, tuple[Resource, Fits]] = field(default_factory=dict)
    """Where it is killed: at the first change that fits."""


def _annotated(name: str) -> Fits:
    return lambda type_, thing: type_ != "DELETED" and name in (thing["metadata"].get("annotations") or {})


def _added(image: str = "") -> Fits:
    def fits(type_: str, thing: Object) -> bool:
        return type_ == "ADDED" and (not image or _image(thing) == image)

    return fits


def _deleted(type_: str, _: Object) -> bool:
    return type_ == "DELETED"


def _image(thing: Object) -> str:
    return str(thing["spec"]["template"]["spec"]["containers"][0].get("image", ""))


def _ready_pod(image: str) -> Fits:
    return lambda _, pod: pod["spec"]["containers"][0]["image"] == image and is_ready(pod)


def _pool_of(replicas: int) -> Fits:
    return lambda _, pool: pool["spec"].get("replicas") == replicas


def _status(type_: str, model: Object) -> bool:
    return type_ == "MODIFIED" and bool((model.get("status") or {}).get("conditions"))


def _failures(_: str, pool: Object) -> bool:
    return '"failures":1' in (pool["metadata"].get("annotations") or {}).get(names.MEMORY_ANNOTATION, "")


async def _two_pairs(desk: Desk) -> None:
    await desk.create("qwen", engine={"image": "worker:1"}, **TWO_PAIRS)
    await _two_pairs_stand(desk)


async def _two_pairs_stand(desk: Desk) -> None:
    await desk.until_serving("qwen", prefill=2, decode=2)
    for role in PAIRS:
        await desk.until_replicas("qwen", role, 2)


async def _decodes(desk: Desk, count: int) -> None:
    await desk.until_serving("qwen", decode=count)
    await desk.until_replicas("qwen", "decode", count)


async def _decodes_made(desk: Desk, count: int) -> None:
    await desk.create("qwen", decode={"replicas": count})
    await _decodes(desk, count)


async def _nothing_is_left(desk: Desk) -> None:
    for resource in (MODELS, POOLS, STATEFULSETS, CONTROLLER_REVISIONS, SERVICES, PODS):
        await desk.eventually(
            lambda resource=resource: desk.all(resource),  # type: ignore[misc]
            lambda found: not found,
            what=f"no {resource.plural} are left",
        )


def _always_all_pairs(world: World) -> str:
    return PairedRollout("qwen", 2, PAIRS).fault(world)


SCENES = {
    "create": Scene(
        act=lambda desk: desk.create("qwen", engine={"image": "worker:1"}, **TWO_PAIRS),
        end=_two_pairs_stand,
        always=most_replicas("qwen", prefill=2, decode=2),
        points={
            "first child": (SERVICES, _added()),
            "first Pool": (POOLS, _added()),
            "revision": (CONTROLLER_REVISIONS, _added()),
            "first replica": (STATEFULSETS, _added()),
            "first status": (MODELS, _status),
        },
    ),
    "scale up": Scene(
        before=lambda desk: _decodes_made(desk, 1),
        act=lambda desk: desk.edit("qwen", decode={"replicas": 4}),
        end=lambda desk: _decodes(desk, 4),
        always=most_replicas("qwen", decode=4),
        points={"number in the Pool": (POOLS, _pool_of(4)), "first replica": (STATEFULSETS, _added())},
    ),
    "scale down": Scene(
        before=lambda desk: _decodes_made(desk, 3),
        act=lambda desk: desk.edit("qwen", decode={"replicas": 1}),
        end=lambda desk: _decodes(desk, 1),
        always=most_replicas("qwen", decode=3),
        points={
            "number in the Pool": (POOLS, _pool_of(1)),
            "a replica drains": (STATEFULSETS, _annotated(names.DRAINING_SINCE_ANNOTATION)),
            "a replica goes": (STATEFULSETS, _deleted),
        },
    ),
    "rollout": Scene(
        before=_two_pairs,
        act=lambda desk: desk.edit("qwen", engine={"image": "worker:2"}),
        end=_two_pairs_stand,
        always=_always_all_pairs,
        points={
            "new revision": (CONTROLLER_REVISIONS, _added()),
            "new set made": (STATEFULSETS, _added("worker:2")),
            "new set ready": (PODS, _ready_pod("worker:2")),
            "old set drains": (STATEFULSETS, _annotated(names.DRAINING_SINCE_ANNOTATION)),
            "old set goes": (STATEFULSETS, _deleted),
        },
    ),
    "deletion": Scene(
        before=_two_pairs,
        act=lambda desk: desk.delete("qwen"),
        end=_nothing_is_left,
        points={"the Model goes": (MODELS, _deleted), "first replica goes": (STATEFULSETS, _deleted)},
    ),
}


@pytest_asyncio.fixture(loop_scope="session")
async def alone(stage: Stage) -> AsyncIterator[Stage]:
    await the_shared_one_ends(stage)
    yield stage


@pytest.fixture(scope="module")
def calm() -> dict[str, Object]:
    """What scenes come to when nobody is killed."""
    return {}


@pytest.mark.parametrize(
    "scene", [pytest.param(scene, marks=pytest.mark.exhaustive if scene == "scale up" else ()) for scene in SCENES]
)
async def test_killed_at_a_turning_point_it_ends_where_it_would_have(
    scene: str, alone: Stage, calm: dict[str, Object], tmp_path: Path
) -> None:
    """Once at each point of the scene, three side by side: these are operators of their own."""
    if scene not in calm:
        async with a_victim(alone, tmp_path, f"calm-{scene}") as victim:
            calm[scene] = await _undisturbed(victim, SCENES[scene])
    turns = asyncio.Semaphore(AT_ONCE)
    async with asyncio.TaskGroup() as group:
        for point in SCENES[scene].points:
            group.create_task(_killed_at(alone, tmp_path, scene, point, calm[scene], turns))


async def _killed_at(
    stage: Stage, folder: Path, scene: str, point: str, calm: Object, turns: asyncio.Semaphore
) -> None:
    resource, fits = SCENES[scene].points[point]
    async with turns, a_victim(stage, folder, f"{scene}-{point}") as victim:

        async def act() -> None:
            async with victim.killed_when(resource, fits) as dead:
                await SCENES[scene].act(victim.desk)
                await dead()
            await victim.revive()

        await _played(victim, dataclasses.replace(SCENES[scene], act=lambda _: act()), calm)


@pytest.mark.parametrize("scene", ["create", pytest.param("rollout", marks=pytest.mark.exhaustive)])
async def test_killed_again_and_again_after_few_writes_it_gets_there(
    scene: str, alone: Stage, calm: dict[str, Object], tmp_path: Path
) -> None:
    """The first process dies at its first write, the next at its third, and so on: each begins from what some part of
    a pass left behind. Every other of these writes reaches the API server."""
    async with a_victim(alone, tmp_path, f"few-writes-{scene}") as victim:
        desk, played = victim.desk, SCENES[scene]
        if scene not in calm:
            calm[scene] = await _undisturbed(victim, played)

        async def act() -> None:
            victim.kill_at_write(1, carried_out=False)
            await played.act(desk)
            lives = 1
            while not await _reached(victim, played):
                lives += 1
                victim.kill_at_write(2 * lives - 1, carried_out=lives % 2 == 0)
                await victim.revive(until_acting=False)
            assert lives > 3
            victim.gate.clear()

        await _played(victim, dataclasses.replace(played, act=lambda _: act()), calm[scene])


async def test_killed_while_it_waits_for_a_deadline_or_a_back_off_it_remembers(alone: Stage, tmp_path: Path) -> None:
    """Side by side, as all have to wait: an image that is not there, and gangs that lost a member."""
    gpu = device()
    await alone.cluster.add_node(gpu.rpartition("/")[2], extended={gpu: 64})
    failed = _annotated(names.FAILED_ANNOTATION)
    async with asyncio.TaskGroup() as group:
        group.create_task(_bad_image(alone, tmp_path, STATEFULSETS, _added("missing:2")))
        group.create_task(_bad_image(alone, tmp_path, CONTROLLER_REVISIONS, failed))
        group.create_task(_gang(alone, tmp_path, gpu, POOLS, _failures))
        group.create_task(_gang(alone, tmp_path, gpu, STATEFULSETS, _deleted))


async def _bad_image(stage: Stage, folder: Path, resource: Resource, fits: Fits) -> None:
    """The new revision is given up once, at the deadline of its first step, and the old pair is never touched."""
    async with a_victim(stage, folder, "bad-image") as victim:
        desk = victim.desk
        await desk.create("qwen", prefill={}, decode={}, rollout={"progressDeadline": SHORT_DEADLINE})
        await desk.until_serving("qwen", prefill=1, decode=1)
        before, since = await desk.pod_uids("qwen"), await desk.version()
        async with victim.killed_when(resource, fits) as dead:
            await desk.edit("qwen", engine={"image": "missing:2"})
            await dead()
        await victim.revive()
        await desk.until("qwen", "RolloutComplete", "False", "ImagePull", says="missing:2", deadline_s=LONG_DEADLINE_S)
        await desk.until("qwen", "Ready", "True")
        for role in PAIRS:
            await desk.until_replicas("qwen", role, 1)
        assert await desk.pod_uids("qwen") == before
        await desk.always(PairedRollout("qwen", 1, PAIRS).fault, since)
        changes = await desk.history.changes(desk.namespace, since)
        tried = {
            change.object["metadata"]["name"]
            for change in changes
            if change.kind == "StatefulSet" and _image(change.object) == "missing:2"
        }
        assert len(tried) == len(PAIRS), "one try: a step that was begun is not begun anew"


async def _gang(stage: Stage, folder: Path, gpu: str, resource: Resource, fits: Fits) -> None:
    """The broken gang goes whole, one failure is counted, and the next comes after the back-off."""
    async with a_victim(stage, folder, "gang") as victim:
        desk = victim.desk
        gang = {"replicas": 1, "parallelism": {"tensor": 4}, "gpusPerPod": 2}
        await desk.create("qwen", decode=gang, accelerator={"resource": gpu})
        await desk.until_serving("qwen", decode=1)
        broken, since = await desk.pods("qwen"), await desk.version()
        async with victim.killed_when(resource, fits) as dead:
            member = broken[1]["metadata"]["name"]
            desk.cluster.simulated.crash(desk.namespace, member, line="NCCL")  # type: ignore[attr-defined]
            await dead()
        await victim.revive()
        old = {pod["metadata"]["uid"] for pod in broken}
        await desk.eventually(
            lambda: desk.pod_uids("qwen"),
            lambda uids: uids and not uids & old,
            what="another gang",
            deadline_s=LONG_DEADLINE_S,
        )
        await desk.until_serving("qwen", decode=1)
        assert (await desk.pool("qwen-decode"))["status"]["failures"] == 1
        await desk.always(most_replicas("qwen", decode=1), since)
        gangs = {replica.name for world in await desk.worlds(since) for replica in world.replicas("qwen")}
        assert len(gangs) == 2, "it was made anew once"


async def _reached(victim: Victim, scene: Scene) -> bool:
    """The end of the scene; False where the operator ended before that."""
    assert victim.operator.process is not None
    end = asyncio.create_task(scene.end(victim.desk))
    death = asyncio.create_task(victim.operator.process.wait())
    try:
        await asyncio.wait({end, death}, return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            return False
        await end
        return True
    finally:
        for task in (end, death):
            task.cancel()
        await asyncio.wait({end, death})


async def _undisturbed(victim: Victim, scene: Scene) -> Object:
    desk = victim.desk
    if scene.before is not None:
        await scene.before(desk)
    await scene.act(desk)
    await scene.end(desk)
    ended = await end_state(desk, "qwen")
    await desk.delete("qwen")
    await _nothing_is_left(desk)
    return ended


async def _played(victim: Victim, scene: Scene, calm: Object) -> None:
    desk = victim.desk
    if scene.before is not None:
        await scene.before(desk)
    since = await desk.version()
    await scene.act(desk)
    await scene.end(desk)
    assert await end_state(desk, "qwen") == calm
    if scene.always is not None:
        await desk.always(scene.always, since)
        await drains_were_kept(desk, since)
