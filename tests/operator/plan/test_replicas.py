"""Replicas: gangs, lost nodes, scaling, hand edits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from antiphon_operator import names
from antiphon_operator.plan.identity import replica_id
from antiphon_operator.plan.memory import PoolMemory, read_pool_memory
from antiphon_operator.plan.observed import AutoscalerView

from tests.operator.plan.cluster import CRASHED, NO_GPU, NO_PLACE, READY, STARTING, Cluster

GANG = {
    "accelerator": {"resource": "nvidia.com/gpu"},
    "prefill": {"replicas": 1},
    "decode": {"replicas": 1, "parallelism": {"tensor": 4}, "gpusPerPod": 1},
    "rollout": {"progressDeadline": "60s"},
}


def first_pods(cluster: Cluster, role: str) -> list[str]:
    return [f"{thing['metadata']['name']}-0" for thing in cluster.sets(role)]


def test_ids_are_four_characters_and_never_the_same_for_two_ordinals() -> None:
    ids = [replica_id("uid", "decode", "abc123", ordinal) for ordinal in range(20_000)]
    assert len(set(ids)) == len(ids)
    assert all(len(one) == 4 and one.isalnum() and one == one.lower() for one in ids)


def test_a_lost_status_and_a_lost_pool_give_no_id_again() -> None:
    cluster = Cluster()
    cluster.settle()
    for _ in range(4):
        cluster.edit(decode={"replicas": 4})
        cluster.settle()
        cluster.forget_statuses()
        cluster.edit(decode={"replicas": 2})
        cluster.settle()
        del cluster.objects["Pool", "qwen-prefill"]
        cluster.settle()
    assert len(cluster.ids_seen) == len(set(cluster.ids_seen))


def test_a_gang_is_ready_when_all_its_pods_are() -> None:
    cluster = Cluster(GANG)
    cluster.run(3)
    assert len(cluster.pods) == 5
    cluster.health = lambda pod: STARTING if pod["metadata"].get("name", "").endswith("-3") else READY
    cluster.run(2)
    assert cluster.model["status"]["pools"]["decode"]["ready"] == 0


def test_a_gang_that_is_not_whole_in_time_is_taken_down_whole_and_waits_longer_each_time() -> None:
    cluster = Cluster(GANG)
    cluster.health = lambda pod: NO_GPU if pod["metadata"].get("name", "").endswith("-3") else READY
    cluster.run(61)
    (gone,) = [event for event in cluster.events if event.reason == "GangIncomplete"]
    assert "3 of 4 pods" in gone.message
    assert not cluster.sets("decode")
    assert len(cluster.sets("prefill")) == 1
    assert cluster.object("Pool", "qwen-decode")["status"]["failures"] == 1
    assert cluster.reason("PoolsReady") == ("False", "BackingOff")
    gaps = []
    for _ in range(3):
        without = cluster.now
        while not cluster.sets("decode"):
            cluster.run(1)
        gaps.append((cluster.now - without).total_seconds())
        while cluster.sets("decode"):
            cluster.run(2, step_s=2)
    assert gaps[0] <= 12
    assert gaps[2] > gaps[0]
    cluster.health = lambda pod: READY
    cluster.run(90, step_s=5)
    assert cluster.reason("Ready") == ("True", "Serving")
    cluster.run(900, step_s=30)
    assert cluster.object("Pool", "qwen-decode")["status"]["failures"] == 0
    assert len(cluster.ids_seen) == len(set(cluster.ids_seen))


def test_a_gang_without_a_place_for_its_ranks_says_which_bundle_lacks_what() -> None:
    cluster = Cluster(GANG)
    cluster.health = lambda pod: NO_PLACE if pod["metadata"].get("name", "").endswith("-0") else STARTING
    cluster.run(3)
    for kind in ("PoolsReady", "Ready"):
        assert cluster.reason(kind) == ("False", "GangUnschedulable")
        assert "bundle 3 of 4 lacks 1 GPU: no pod has as many that are free" in cluster.condition(kind)["message"]
        assert "change parallelism, gpusPerPod or resources" in cluster.condition(kind)["message"]


def test_what_a_gang_waits_for_is_read_from_its_first_pods_page_when_the_others_have_joined() -> None:
    cluster = Cluster(GANG)
    ready: set[str] = {"1", "2"}
    cluster.health = lambda pod: (
        STARTING if "-decode-" in (name := pod["metadata"].get("name", "")) and name[-1] not in ready else READY
    )
    cluster.run(2)
    (first,) = first_pods(cluster, "decode")
    cluster.problems[first] = "GangUnschedulable: stage 0 needs 4 GPU on one node; the node with most has 3"
    cluster.run(2)
    assert first not in cluster.asked_workers
    assert cluster.reason("PoolsReady") == ("False", "Starting"), "the third may bring what is lacking"
    ready.add("3")
    cluster.run(3)
    assert cluster.reason("PoolsReady") == ("False", "GangUnschedulable")
    assert f"{first}: stage 0 needs 4 GPU on one node" in cluster.condition("PoolsReady")["message"]
    cluster.problems[first] = "rank 2 is gone: killed"
    cluster.run(2)
    assert cluster.reason("PoolsReady") == ("False", "Starting")
    assert "rank 2 is gone: killed" in cluster.condition("PoolsReady")["message"]
    ready.add("0")
    cluster.settle()
    assert cluster.reason("Ready") == ("True", "Serving")


def test_a_pod_that_finds_no_node_is_told_before_the_gang_that_lacks_it() -> None:
    cluster = Cluster({**GANG, "prefill": None})
    cluster.model["spec"].pop("prefill")
    states = {"0": NO_PLACE, "3": NO_GPU}
    cluster.health = lambda pod: states.get(pod["metadata"].get("name", " ")[-1], STARTING)
    cluster.run(3)
    assert cluster.reason("PoolsReady") == ("False", "InsufficientGpus")


def test_only_models_with_a_gang_have_a_token_for_it() -> None:
    cluster = Cluster(GANG)
    assert cluster.tick().gang_secret == "qwen-ray"
    cluster.edit(decode={"gpusPerPod": 4})
    assert cluster.tick().gang_secret == "qwen-ray", "gangs of the revision before are still there"
    assert Cluster().tick().gang_secret is None


def test_the_back_off_survives_the_loss_of_the_status() -> None:
    cluster = Cluster(GANG)
    cluster.health = lambda pod: NO_GPU if pod["metadata"].get("name", "").endswith("-3") else READY
    cluster.run(61)
    cluster.forget_statuses()
    cluster.run(1)
    assert not cluster.sets("decode")
    memory = cluster.object("Pool", "qwen-decode")["metadata"]["annotations"][names.MEMORY_ANNOTATION]
    assert read_pool_memory(memory).failures == 1


def test_a_gang_that_stands_for_a_while_after_its_failure_was_counted_is_one_failure() -> None:
    """Who counted it was killed, or refused, before it could take the gang down."""
    cluster = Cluster(GANG)
    cluster.health = lambda pod: NO_GPU if pod["metadata"].get("name", "").endswith("-3") else READY
    cluster.run(55)
    for _ in range(10):
        cluster.now += timedelta(seconds=1)
        looked = cluster.tick(killed_after=100)
    assert cluster.sets("decode")
    assert [delete.kind for delete in looked.deletes] == ["StatefulSet"]
    cluster.run(0)
    assert not cluster.sets("decode")
    memory = cluster.object("Pool", "qwen-decode")["metadata"]["annotations"][names.MEMORY_ANNOTATION]
    assert read_pool_memory(memory).failures == 1


def test_a_broken_gang_is_gone_before_the_next_is_made_also_when_its_back_off_passed_meanwhile() -> None:
    """Who counted the failure was killed, and nobody acted until the back-off was over."""
    cluster = Cluster(GANG)
    cluster.settle()
    (before,) = first_pods(cluster, "decode")
    cluster.delete_pod(before[:-1] + "2")
    cluster.tick(killed_after=100)
    assert cluster.object("Pool", "qwen-decode")["metadata"]["annotations"][names.MEMORY_ANNOTATION]
    assert first_pods(cluster, "decode") == [before]
    cluster.now += timedelta(seconds=30)
    looked = cluster.tick()
    assert [delete.kind for delete in looked.deletes] == ["StatefulSet"]
    assert not cluster.sets("decode")
    cluster.run(1)
    assert len(cluster.sets("decode")) == 1


def test_back_off_grows_to_five_minutes_with_jitter() -> None:
    waits = []
    for failures in range(1, 12):
        memory = PoolMemory(failures=failures, failed_at="2026-01-01T00:00:00Z")
        at = memory.retry_at("uid", "decode")
        assert at is not None
        waits.append(at.timestamp() - 1767225600)
    assert 5 <= waits[0] <= 10
    assert all(150 <= wait <= 300 for wait in waits[5:])
    assert len(set(waits[5:])) == len(waits[5:])


def test_a_gang_that_lost_a_member_is_made_anew() -> None:
    cluster = Cluster(GANG)
    cluster.settle()
    (before,) = first_pods(cluster, "decode")
    cluster.delete_pod(before[:-1] + "2")
    cluster.run(30)
    (after,) = first_pods(cluster, "decode")
    assert after != before
    assert cluster.reason("Ready") == ("True", "Serving")


def test_a_pod_that_crashes_alone_is_left_to_its_kubelet() -> None:
    cluster = Cluster()
    cluster.settle()
    uids = {thing["metadata"]["uid"] for thing in cluster.sets()}
    victim = first_pods(cluster, "decode")[0]
    cluster.health = lambda pod: CRASHED if pod["metadata"].get("name") == victim else READY
    cluster.run(30)
    assert {thing["metadata"]["uid"] for thing in cluster.sets()} == uids
    assert cluster.reason("PoolsReady") == ("False", "EngineCrash")
    assert cluster.reason("Ready") == ("True", "Degraded")
    assert cluster.last is not None
    assert victim in cluster.last.wants.log_of
    cluster.health = lambda pod: READY
    cluster.settle()
    assert cluster.reason("Ready") == ("True", "Serving")


def test_a_replica_on_a_lost_node_is_replaced_at_once_and_its_pod_blocks_nothing() -> None:
    cluster = Cluster()
    cluster.settle()
    victim = first_pods(cluster, "decode")[0]
    cluster.lose_node(cluster.pods[victim]["spec"]["nodeName"])
    cluster.tick()
    assert victim not in first_pods(cluster, "decode")
    assert len(cluster.sets("decode")) == 2
    assert cluster.pods[victim]["metadata"]["deletionTimestamp"]
    assert any(event.reason == "NodeLost" for event in cluster.events)
    cluster.settle()
    assert cluster.reason("PoolsReady") == ("True", "AllReady")
    assert cluster.last is not None
    assert cluster.last.record is not None
    assert victim in cluster.last.record.draining
    cluster.edit(engine={"image": "worker:2"})
    cluster.settle()
    assert cluster.reason("RolloutComplete") == ("True", "Complete")
    assert len(cluster.ids_seen) == len(set(cluster.ids_seen))


def test_losing_the_old_pair_in_mid_rollout_brings_the_old_pair_back() -> None:
    cluster = Cluster()
    cluster.settle()
    old = cluster.revision()
    cluster.health = lambda pod: STARTING if pod["spec"]["containers"][0].get("image") == "worker:bad" else READY
    cluster.edit(engine={"image": "worker:bad"})
    cluster.run(5)
    for pod in first_pods(cluster, "prefill") + first_pods(cluster, "decode"):
        if old in pod:
            cluster.lose_node(cluster.pods[pod]["spec"]["nodeName"])
    cluster.run(3)
    assert len(cluster.sets("decode", old)) == 2
    assert cluster.reason("Ready") == ("True", "Serving")


def test_scaling_down_takes_what_is_not_ready_first_then_the_newest_and_drains_it() -> None:
    cluster = Cluster({"decode": {"replicas": 4}})
    cluster.settle()
    pods = first_pods(cluster, "decode")
    by_age = sorted(pods, key=lambda pod: int(_ordinal(cluster, pod)))
    cluster.health = lambda pod: STARTING if pod["metadata"].get("name") == by_age[0] else READY
    cluster.busy = set(pods)
    cluster.edit(decode={"replicas": 2})
    cluster.run(2)
    draining = {f"{thing['metadata']['name']}-0" for thing in cluster.sets("decode", draining=True)}
    assert by_age[0] not in first_pods(cluster, "decode"), "what never started has nothing to drain"
    assert draining == {by_age[3]}
    cluster.busy = set()
    cluster.settle()
    assert first_pods(cluster, "decode") == [by_age[1], by_age[2]]


def _ordinal(cluster: Cluster, pod: str) -> str:
    return str(cluster.object("StatefulSet", pod[:-2])["metadata"]["annotations"][names.ORDINAL_ANNOTATION])


def test_scaling_up_again_takes_back_what_drains() -> None:
    cluster = Cluster()
    cluster.settle()
    cluster.busy = set(cluster.pods)
    cluster.edit(decode={"replicas": 1})
    cluster.run(3)
    made = len(cluster.ids_seen)
    cluster.edit(decode={"replicas": 2})
    cluster.run(3)
    assert len(cluster.sets("decode", draining=False)) == 2
    assert len(cluster.ids_seen) == made


def test_scaled_to_zero_and_back() -> None:
    cluster = Cluster()
    cluster.settle()
    cluster.edit(prefill={"replicas": 0}, decode={"replicas": 0})
    cluster.settle()
    assert not cluster.sets()
    assert cluster.reason("Ready") == ("False", "ScaledToZero")
    assert cluster.model["status"]["phase"] == "Sleeping"
    assert cluster.last is not None
    assert cluster.last.record is not None
    assert not cluster.last.record.waking, "nobody would wake it"
    cluster.edit(engine={"image": "worker:2"}, prefill={"replicas": 1}, decode={"replicas": 2})
    cluster.run(1)
    assert len(cluster.sets(revision=cluster.revision())) == 3, "there is nothing to protect"
    cluster.settle()
    assert cluster.reason("Ready") == ("True", "Serving")


def test_advise_changes_nothing_and_enforce_keeps_to_the_bounds() -> None:
    cluster = Cluster({"autoscaling": {"mode": "Advise"}})
    cluster.autoscaler = AutoscalerView({"prefill": 3, "decode": 20})
    cluster.settle()
    assert len(cluster.sets("decode")) == 2
    cluster.edit(autoscaling={"mode": "Enforce", "prefill": {"min": 1, "max": 2}, "decode": {"min": 1, "max": 5}})
    cluster.settle()
    assert (len(cluster.sets("prefill")), len(cluster.sets("decode"))) == (2, 5)
    cluster.autoscaler = None
    cluster.settle()
    assert (len(cluster.sets("prefill")), len(cluster.sets("decode"))) == (2, 5), "no advice is no change"


def test_another_manager_takes_a_pool_over_and_gives_it_back_without_a_dip() -> None:
    cluster = Cluster({"autoscaling": {"mode": "External"}})
    cluster.settle()

    def applied() -> Any:
        assert cluster.last is not None
        (pool,) = [
            apply.manifest
            for apply in cluster.last.applies
            if apply.manifest["metadata"]["name"] == "qwen-decode" and apply.manifest["kind"] == "Pool"
        ]
        return pool["spec"].get("replicas", "not applied")

    assert applied() == 2, "as long as nobody else has it"
    pool = cluster.object("Pool", "qwen-decode")
    pool["spec"] = {**pool["spec"], "replicas": 3}
    pool["metadata"]["managedFields"] = [
        {"manager": "keda", "subresource": "scale", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    ]
    cluster.settle()
    assert applied() == "not applied"
    assert len(cluster.sets("decode")) == 3
    cluster.edit(autoscaling={"mode": "Disabled"}, decode={"replicas": 3})
    cluster.settle()
    assert applied() == 3
    assert len(cluster.sets("decode")) == 3


def test_a_replica_scaled_or_given_another_image_by_hand_is_put_back() -> None:
    cluster = Cluster()
    cluster.settle()
    name = cluster.sets("decode")[0]["metadata"]["name"]
    live = cluster.object("StatefulSet", name)
    live["spec"] = {**live["spec"], "replicas": 3}
    cluster.tick()
    assert cluster.object("StatefulSet", name)["spec"]["replicas"] == 1


def test_a_replica_deleted_by_hand_comes_back_under_another_id() -> None:
    cluster = Cluster()
    cluster.settle()
    name = cluster.sets("decode")[0]["metadata"]["name"]
    cluster._remove("StatefulSet", name)
    cluster.settle()
    assert len(cluster.sets("decode")) == 2
    assert len(cluster.ids_seen) == len(set(cluster.ids_seen))


def test_replicas_whose_revision_was_deleted_by_hand_can_still_be_drained() -> None:
    cluster = Cluster()
    cluster.settle()
    old = cluster.revision()
    cluster.edit(engine={"image": "worker:2"})
    cluster.run(1)
    del cluster.objects["ControllerRevision", names.revision_name("qwen", old)]
    cluster.settle()
    assert cluster.revisions() == {cluster.revision()} != {old}
