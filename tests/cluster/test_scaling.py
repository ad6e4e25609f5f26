"""Who decides how many replicas there are, and that handing it over never costs one."""

from __future__ import annotations

from tests.cluster.history import POOLS, World
from tests.cluster.support import Desk, is_so
from tests.support.kube.resources import POD_DISRUPTION_BUDGETS


async def test_scaling_adds_and_removes_replicas_and_makes_no_revision(desk: Desk) -> None:
    await desk.create("qwen", prefill={"replicas": 1}, decode={"replicas": 2})
    await desk.until_serving("qwen", prefill=1, decode=2)
    before, revisions = await desk.pod_uids("qwen"), await desk.revisions("qwen")
    await desk.edit("qwen", decode={"replicas": 3}, prefill={"replicas": 2})
    await desk.until_serving("qwen", prefill=2, decode=3)
    assert before < await desk.pod_uids("qwen")
    await desk.edit("qwen", decode={"replicas": 1}, prefill={"replicas": 1})
    await desk.until_serving("qwen", prefill=1, decode=1)
    await desk.until_replicas("qwen", "decode", 1)
    await desk.until_replicas("qwen", "prefill", 1)
    assert await desk.pod_uids("qwen") < before
    assert await desk.revisions("qwen") == revisions


async def test_a_replica_that_goes_is_drained_before_it_is_deleted(desk: Desk) -> None:
    await desk.create("qwen", decode={"replicas": 2}, rollout={"drainTimeout": "2s"})
    await desk.until_serving("qwen", decode=2)
    since = await desk.version()
    await desk.edit("qwen", decode={"replicas": 1})
    await desk.until_replicas("qwen", "decode", 1)
    drained: set[str] = set()
    for world in await desk.worlds(since):
        assert world.change is not None
        drained |= {replica.name for replica in world.replicas("qwen") if replica.draining}
        if world.change.type == "DELETED" and world.change.kind == "StatefulSet":
            assert world.change.object["metadata"]["name"] in drained
    assert len(drained) == 1


async def test_a_promise_is_changed_without_touching_a_pod(desk: Desk) -> None:
    await desk.create("qwen", prefill={}, decode={"replicas": 2})
    await desk.until_serving("qwen", prefill=1, decode=2)
    before, revisions = await desk.pod_uids("qwen"), await desk.revisions("qwen")
    await desk.edit(
        "qwen",
        sla={"ttft": {"p95": "300ms", "perThousandTokens": "60ms"}, "tpot": {"p95": "30ms"}},
        names=["qwen", "other"],
    )
    model = await desk.until("qwen", "RolloutComplete", "True")
    assert model["status"]["sla"]["ttft"]["target"] == "300ms"
    assert model["status"]["effective"]["names"] == ["qwen", "other"]
    assert await desk.pod_uids("qwen") == before
    assert await desk.revisions("qwen") == revisions


async def test_under_external_another_manager_scales_one_pool(desk: Desk) -> None:
    await desk.create("qwen", prefill={"replicas": 1}, decode={"replicas": 2}, autoscaling={"mode": "External"})
    await desk.until_serving("qwen", prefill=1, decode=2)
    await desk.scale("qwen-decode", 3)
    await desk.until_serving("qwen", prefill=1, decode=3)
    pool = await desk.pool("qwen-decode")
    owners = {
        entry["manager"]
        for entry in pool["metadata"]["managedFields"]
        if "f:replicas" in (entry["fieldsV1"].get("f:spec") or {})
    }
    assert "antiphon-operator" not in owners
    assert pool["status"]["replicas"] == 3
    assert pool["status"]["readyReplicas"] == 3
    # the Model's own number means nothing now
    await desk.edit("qwen", decode={"replicas": 5})
    await desk.until("qwen", "RolloutComplete", "True")
    await desk.scale("qwen-decode", 1)
    await desk.until_serving("qwen", prefill=1, decode=1)


async def test_handing_over_and_taking_back_never_dips(desk: Desk) -> None:
    await desk.create("qwen", prefill={}, decode={"replicas": 3})
    await desk.until_serving("qwen", prefill=1, decode=3)
    before = await desk.pod_uids("qwen")
    since = await desk.version()
    await desk.edit("qwen", autoscaling={"mode": "External"})
    await desk.until("qwen", "Ready", "True")
    await desk.co_own("qwen-decode", 3)
    await desk.eventually(
        lambda: desk.pool("qwen-decode"), lambda pool: not _is_ours(pool), what="our manager lets the number go"
    )
    await desk.edit("qwen", autoscaling={"mode": "Disabled"})
    await desk.eventually(lambda: desk.pool("qwen-decode"), _is_ours, what="our manager has the number again")
    await desk.until_serving("qwen", prefill=1, decode=3)
    assert await desk.pod_uids("qwen") == before

    def dips(world: World) -> str:
        for pool in world.all("Pool", "qwen"):
            wanted = {"decode": 3, "prefill": 1}[pool["spec"]["role"]]
            if pool["spec"].get("replicas") != wanted:
                return f"Pool {pool['metadata']['name']} wants {pool['spec'].get('replicas')}"
        serving = [replica for replica in world.replicas("qwen", "decode") if replica.ready and not replica.draining]
        return "" if len(serving) == 3 else f"{len(serving)} decode replicas serve"

    await desk.always(dips, since)


async def test_without_external_a_hand_edit_of_a_pool_is_put_back_with_an_event(desk: Desk) -> None:
    await desk.create("qwen", decode={"replicas": 2})
    await desk.until_serving("qwen", decode=2)
    await desk.scale("qwen-decode", 5)
    await desk.eventually(
        lambda: desk.pool("qwen-decode"), lambda pool: pool["spec"]["replicas"] == 2, what="2 replicas are wanted again"
    )
    event = await desk.until_event("qwen", "HandEditPutBack")
    assert "qwen-decode" in event["message"]
    assert "spec.replicas" in event["message"]
    await desk.until_serving("qwen", decode=2)


async def test_a_hand_edit_of_another_child_is_put_back_too(desk: Desk) -> None:
    await desk.create("qwen", decode={"replicas": 2})
    await desk.until_serving("qwen", decode=2)
    (budget,) = await desk.all(POD_DISRUPTION_BUDGETS)
    wanted = budget["spec"]
    selector = {"matchLabels": {"antiphon.dev/model": "another"}}
    await desk.cluster.client.merge_patch(
        POD_DISRUPTION_BUDGETS, desk.namespace, "qwen-decode", {"spec": {"selector": selector}}
    )
    await desk.eventually(
        lambda: desk.all(POD_DISRUPTION_BUDGETS), lambda found: found[0]["spec"] == wanted, what="it is as it was"
    )
    await desk.until_event("qwen", "HandEditPutBack")


async def test_a_deleted_pool_comes_back_with_its_number(desk: Desk) -> None:
    await desk.create("qwen", decode={"replicas": 2})
    await desk.until_serving("qwen", decode=2)
    before, uid = await desk.pod_uids("qwen"), (await desk.pool("qwen-decode"))["metadata"]["uid"]
    await desk.cluster.delete(POOLS, desk.namespace, "qwen-decode")
    await desk.eventually(
        lambda: desk.all(POOLS),
        lambda pools: [pool["metadata"]["uid"] for pool in pools] not in ([], [uid]),
        what="a new Pool",
    )
    assert (await desk.pool("qwen-decode"))["spec"]["replicas"] == 2
    await desk.until_serving("qwen", decode=2)
    assert await desk.pod_uids("qwen") == before


async def test_to_zero_and_back(desk: Desk) -> None:
    await desk.create("qwen", prefill={}, decode={})
    await desk.until_serving("qwen", prefill=1, decode=1)
    await desk.edit("qwen", prefill={"replicas": 0}, decode={"replicas": 0})
    asleep = await desk.until("qwen", "Ready", "False", "ScaledToZero", says="spec.decode.replicas")
    assert asleep["status"]["phase"] == "Sleeping"
    await desk.until_replicas("qwen", "decode", 0)
    await desk.until_replicas("qwen", "prefill", 0)
    asleep = await desk.model("qwen")
    assert is_so(asleep, "PoolsReady")
    await desk.edit("qwen", prefill={"replicas": 1}, decode={"replicas": 1})
    await desk.until_serving("qwen", prefill=1, decode=1)


async def test_a_prefill_pool_may_sleep_alone(desk: Desk) -> None:
    await desk.create("qwen", prefill={"replicas": 0}, decode={"replicas": 1})
    model = await desk.until_serving("qwen", prefill=0, decode=1)
    assert is_so(model, "Ready")
    await desk.edit("qwen", prefill={"replicas": 1})
    await desk.until_serving("qwen", prefill=1, decode=1)


def _is_ours(pool: dict[str, object]) -> bool:
    return any(
        entry["manager"] == "antiphon-operator" and "f:replicas" in (entry["fieldsV1"].get("f:spec") or {})
        for entry in pool["metadata"]["managedFields"]  # type: ignore[index]
    )
