"""A new revision takes over in pairs. What is promised of a rollout is checked after every single change."""

from __future__ import annotations

import asyncio

import pytest
from antiphon_operator import names

from tests.cluster.history import POOLS, Object, label
from tests.cluster.rollouts import PairedRollout
from tests.cluster.stage import device
from tests.cluster.support import SHORT_DEADLINE, Desk, is_so, message
from tests.support.kube.resources import CONTROLLER_REVISIONS

PAIRS = {"prefill": 1, "decode": 1}


@pytest.mark.parametrize(
    ("sets", "unit", "surge", "max_unavailable"),
    [
        pytest.param(1, PAIRS, 1, 0, id="one pair"),
        pytest.param(2, {"prefill": 1, "decode": 2}, 1, 0, id="2 prefill and 4 decode"),
        pytest.param(3, PAIRS, 2, 0, id="three pairs with surge 2"),
        pytest.param(2, PAIRS, 0, 1, id="two pairs without room"),
        pytest.param(2, {"decode": 1}, 1, 0, id="aggregated"),
    ],
)
async def test_a_new_image_takes_over_in_sets(
    desk: Desk, sets: int, unit: dict[str, int], surge: int, max_unavailable: int
) -> None:
    replicas = {role: size * sets for role, size in unit.items()}
    await desk.create(
        "qwen",
        **{role: {"replicas": count} for role, count in replicas.items()},
        rollout={"surge": surge, "maxUnavailable": max_unavailable, "drainTimeout": "1s"},
    )
    old = (await desk.until_serving("qwen", **replicas))["status"]["revision"]["current"]
    await _all_replicas(desk, replicas)
    since = await desk.version()
    await desk.edit("qwen", engine={"image": "worker:2"})
    model = await desk.until_serving("qwen", **replicas)
    await _all_replicas(desk, replicas)
    new = model["status"]["revision"]["current"]
    assert new != old
    assert await desk.revisions("qwen") == [old, new]
    assert model["status"]["resolved"]["image"] == "worker:2"
    assert _images(await desk.pods("qwen")) == {"worker:2"}
    promised = PairedRollout("qwen", sets, unit, surge, max_unavailable)
    await desk.always(promised.fault, since)
    await desk.always(lambda world: "" if world.condition("qwen", "Ready")["status"] == "True" else "not Ready", since)
    await desk.until_event("qwen", "RolloutComplete")


async def test_without_surge_the_status_says_beforehand_what_a_change_costs(desk: Desk) -> None:
    await desk.create("qwen", decode={"replicas": 4}, rollout={"surge": 0, "maxUnavailable": 2})
    model = await desk.until_serving("qwen", decode=4)
    assert "2 of 4 sets down first, 50 % of the capacity" in message(model, "RolloutComplete")


async def test_back_to_the_old_spec_in_the_middle_of_a_rollout(desk: Desk) -> None:
    await desk.create("qwen", prefill={"replicas": 2}, decode={"replicas": 2}, engine={"image": "worker:1"})
    old = (await desk.until_serving("qwen", prefill=2, decode=2))["status"]["revision"]["current"]
    before = await desk.pod_uids("qwen")
    since = await desk.version()
    await desk.edit("qwen", engine={"image": "slow:2"})
    await desk.until("qwen", "RolloutComplete", "False", "InProgress")
    await desk.eventually(lambda: desk.pods("qwen"), lambda pods: len(pods) > 4, what="pods of the new revision")
    await desk.edit("qwen", engine={"image": "worker:1"})
    model = await desk.until_serving("qwen", prefill=2, decode=2)
    await _all_replicas(desk, {"prefill": 2, "decode": 2})
    assert model["status"]["revision"]["current"] == old
    assert await desk.pod_uids("qwen") == before
    await desk.always(PairedRollout("qwen", 2, PAIRS).fault, since)


async def test_a_third_revision_in_the_middle_of_a_rollout(desk: Desk) -> None:
    await desk.create("qwen", prefill={"replicas": 2}, decode={"replicas": 2}, engine={"image": "worker:1"})
    await desk.until_serving("qwen", prefill=2, decode=2)
    since = await desk.version()
    await desk.edit("qwen", engine={"image": "slow:2"})
    await desk.eventually(
        lambda: desk.pods("qwen"), lambda pods: "slow:2" in _images(pods), what="pods of the second revision"
    )
    await desk.edit("qwen", engine={"image": "worker:3"})
    await desk.until_serving("qwen", prefill=2, decode=2)
    await _all_replicas(desk, {"prefill": 2, "decode": 2})
    assert _images(await desk.pods("qwen")) == {"worker:3"}
    await desk.always(PairedRollout("qwen", 2, PAIRS).fault, since)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)], ids=["up", "down"])
async def test_scaling_in_the_middle_of_a_rollout(desk: Desk, before: int, after: int) -> None:
    await desk.create("qwen", prefill={"replicas": before}, decode={"replicas": before}, engine={"image": "worker:1"})
    await desk.until_serving("qwen", prefill=before, decode=before)
    since = await desk.version()
    await desk.edit("qwen", engine={"image": "slow:2"})
    await desk.eventually(
        lambda: desk.pods("qwen"), lambda pods: "slow:2" in _images(pods), what="pods of the new revision"
    )
    await desk.edit("qwen", prefill={"replicas": after}, decode={"replicas": after})
    await desk.until_serving("qwen", prefill=after, decode=after)
    await _all_replicas(desk, {"prefill": after, "decode": after})
    assert _images(await desk.pods("qwen")) == {"slow:2"}
    few, many = sorted((before, after))
    await desk.always(PairedRollout("qwen", few, PAIRS, surge=1 + many - few).fault, since)


async def test_going_back_after_a_rollout_makes_no_third_revision(desk: Desk) -> None:
    await desk.create("qwen", engine={"image": "worker:1"})
    first = (await desk.until_serving("qwen", decode=1))["status"]["revision"]["current"]
    await desk.edit("qwen", engine={"image": "worker:2"})
    await desk.until("qwen", "RolloutComplete", "True", "Complete")
    await desk.edit("qwen", engine={"image": "worker:1"})
    model = await desk.until("qwen", "RolloutComplete", "True", "Complete")
    assert model["status"]["revision"]["current"] == first
    assert len(await desk.revisions("qwen")) == 2


async def test_a_paused_rollout_takes_no_further_step(desk: Desk) -> None:
    await desk.create("qwen", prefill={"replicas": 2}, decode={"replicas": 2})
    old = (await desk.until_serving("qwen", prefill=2, decode=2))["status"]["revision"]["current"]
    before = await desk.pod_uids("qwen")
    await desk.edit("qwen", engine={"image": "worker:2"}, rollout={"paused": True})
    model = await desk.until("qwen", "RolloutComplete", "False", "Paused", says="spec.rollout.paused")
    assert is_so(model, "Ready")
    assert model["status"]["revision"] == {"current": model["status"]["revision"]["current"], "previous": old}
    assert await desk.pod_uids("qwen") == before
    await desk.edit("qwen", rollout={"paused": False})
    await desk.until_serving("qwen", prefill=2, decode=2)
    await _all_replicas(desk, {"prefill": 2, "decode": 2})
    assert not before & await desk.pod_uids("qwen")


async def test_a_revision_that_cannot_come_up_is_given_up_and_the_old_one_is_untouched(desk: Desk) -> None:
    """Three Models at once, as each has to wait for the shortest deadline that there is."""
    short = {"progressDeadline": SHORT_DEADLINE}
    gpu = device()
    await desk.cluster.add_node(gpu.rpartition("/")[2], extended={gpu: 2})
    pair = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}, "rollout": short}
    await desk.create("image", **pair)
    await desk.create("crash", **pair)
    await desk.create("full", **pair, accelerator={"resource": gpu})
    models = ("image", "crash", "full")
    before = {}
    for name in models:
        await desk.until_serving(name, prefill=1, decode=1)
        before[name] = await desk.pod_uids(name)
    since = await desk.version()
    await desk.edit("image", engine={"image": "missing:2"})
    await desk.edit("crash", engine={"image": "crash:2"})
    await desk.edit("full", engine={"image": "worker:2"})
    # what is wrong is told at once, long before the deadline
    await desk.until("image", "RolloutComplete", "False", "InProgress", says="missing:2")
    await desk.until("crash", "RolloutComplete", "False", "InProgress", says="RuntimeError: the engine could not start")
    await desk.until("full", "RolloutComplete", "False", "InProgress", says=f"Insufficient {gpu}")
    given_up = {
        "image": await desk.until("image", "RolloutComplete", "False", "ImagePull", says="missing:2"),
        "crash": await desk.until(
            "crash", "RolloutComplete", "False", "EngineCrash", says="the engine could not start"
        ),
        "full": await desk.until("full", "RolloutComplete", "False", "InsufficientGpus", says=f"Insufficient {gpu}"),
    }
    for name, model in given_up.items():
        assert is_so(model, "Ready"), name
        assert is_so(model, "PoolsReady"), name
        old = model["status"]["revision"]["previous"]
        assert f"{old} serves" in message(model, "RolloutComplete")
        await desk.until_event(name, "RolloutFailed")
        await desk.until_replicas(name, "prefill", 1)
        await desk.until_replicas(name, "decode", 1)
        assert await desk.pod_uids(name) == before[name]
        await desk.always(PairedRollout(name, 1, PAIRS).fault, since)
    # another spec is tried at once
    await desk.edit("image", engine={"image": "worker:3"})
    await desk.edit("crash", engine={"image": "worker:3"})
    await asyncio.gather(
        desk.until_serving("image", prefill=1, decode=1), desk.until_serving("crash", prefill=1, decode=1)
    )
    # and the same one again when a person asks for it, here after room was made
    await desk.cluster.add_node(device().rpartition("/")[2], extended={gpu: 2})
    failed = given_up["full"]["status"]["revision"]["current"]
    await desk.annotate(CONTROLLER_REVISIONS, names.revision_name("full", failed), failed=None)
    model = await desk.until_serving("full", prefill=1, decode=1)
    assert model["status"]["revision"]["current"] == failed


async def test_a_prefill_pool_is_added_and_removed_without_a_moment_of_silence(desk: Desk) -> None:
    await desk.create("qwen", decode={"replicas": 1})
    await desk.until_serving("qwen", decode=1)
    since = await desk.version()
    await desk.edit("qwen", prefill={"replicas": 1})
    await desk.until_serving("qwen", prefill=1, decode=1)
    await desk.edit("qwen", prefill=None)
    await desk.until_serving("qwen", decode=1)
    await desk.until_replicas("qwen", "prefill", 0)
    await desk.eventually(
        lambda: desk.all(POOLS), lambda pools: len(pools) == 1, what="the Pool of the prefill workers is gone"
    )
    await desk.always(lambda world: "" if world.can_serve("qwen") else "no revision can answer a request", since)


def _images(pods: list[Object]) -> set[str]:
    return {pod["spec"]["containers"][0]["image"] for pod in pods}


async def _all_replicas(desk: Desk, replicas: dict[str, int]) -> None:
    """What was drained is gone, pods included."""
    for role, count in replicas.items():
        sets = await desk.until_replicas("qwen", role, count)
        assert len({label(thing, names.REVISION_LABEL) for thing in sets}) == 1
