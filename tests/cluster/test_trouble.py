"""What keeps a Model from its first start: the status says what it is in the cluster's own words, and it ends by itself
once the cause is gone."""

from __future__ import annotations

import asyncio

import pytest
from antiphon_operator import names

from tests.cluster.history import label
from tests.cluster.stage import device
from tests.cluster.support import Desk, is_so, message
from tests.support.kube.kubelets.simulated import Script
from tests.support.kube.resources import PODS, RESOURCE_QUOTAS, STATEFULSETS


async def test_a_model_waits_for_devices_and_starts_when_a_node_comes(desk: Desk) -> None:
    gpu = device()
    await desk.create("qwen", accelerator={"resource": gpu}, prefill={}, decode={"parallelism": {"tensor": 2}})
    model = await desk.until("qwen", "Ready", "False", "InsufficientGpus", says=f"Insufficient {gpu}")
    assert "nodes are available" in message(model, "Ready"), "the scheduler's own words"
    assert "add nodes" in message(model, "Ready")
    model = await desk.eventually(
        lambda: desk.model("qwen"),
        lambda model: {pool["reason"] for pool in model["status"]["pools"].values()} == {"InsufficientGpus"},
        what="both pools say what they lack",
    )
    assert model["status"]["pools"]["decode"]["gpus"] == 2
    sets = await desk.all(STATEFULSETS)
    await desk.cluster.add_node(gpu.rpartition("/")[2], extended={gpu: 3})
    await desk.until_serving("qwen", prefill=1, decode=1)
    after = await desk.all(STATEFULSETS)
    assert [thing["metadata"]["uid"] for thing in after] == [thing["metadata"]["uid"] for thing in sets]


async def test_a_quota_shows_in_the_status_and_its_raise_is_enough(desk: Desk) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few", "namespace": desk.namespace}}
    await desk.cluster.create(RESOURCE_QUOTAS, {**quota, "spec": {"hard": {"pods": "1"}}})
    await desk.create("qwen", decode={"replicas": 2})
    await desk.until("qwen", "PoolsReady", "False", "QuotaExceeded", says="exceeded quota: few")
    model = await desk.until("qwen", "Ready", "True", "Degraded", says="exceeded quota: few")
    assert model["status"]["phase"] == "Degraded"
    assert "kubectl describe resourcequota" in message(model, "PoolsReady")
    await desk.cluster.client.merge_patch(RESOURCE_QUOTAS, desk.namespace, "few", {"spec": {"hard": {"pods": "2"}}})
    await desk.until_serving("qwen", decode=2)


@pytest.mark.parametrize(
    ("image", "reason", "says"),
    [
        pytest.param("missing:1", "ImagePull", "missing:1", id="image that is not there"),
        pytest.param("crash:1", "EngineCrash", "RuntimeError: the engine could not start", id="engine that crashes"),
    ],
)
async def test_a_first_start_that_fails_says_why_and_is_cured_by_the_spec(
    desk: Desk, image: str, reason: str, says: str
) -> None:
    await desk.create("qwen", engine={"image": image}, prefill={}, decode={})
    model = await desk.until("qwen", "Ready", "False", reason, says=says)
    assert not is_so(model, "RolloutComplete")
    if reason == "EngineCrash":
        assert "kubectl logs" in message(model, "Ready")
    await desk.edit("qwen", engine={"image": "worker:1"})
    await desk.until_serving("qwen", prefill=1, decode=1)
    for role in names.ROLES:
        (only,) = await desk.until_replicas("qwen", role, 1)
        assert only["spec"]["template"]["spec"]["containers"][0]["image"] == "worker:1"


async def test_the_last_line_of_a_crashed_workers_log_is_in_the_status(desk: Desk) -> None:
    log = ("loading the weights", "RuntimeError: CUDA error: device-side assert")
    crash = Script(end_s=0.02, ready_s=None, exit_code=1, log=log)
    cured = asyncio.Event()
    desk.script(lambda pod, container: None if cured.is_set() else crash)
    await desk.create("qwen", decode={})
    await desk.until("qwen", "Ready", "False", "EngineCrash", says=f'"{log[1]}"')
    # what was wrong with the node is mended: the kubelet's next try does it
    cured.set()
    await desk.until_serving("qwen", decode=1)


async def test_a_worker_that_crashes_once_comes_back_by_itself(desk: Desk) -> None:
    await desk.create("qwen", decode={})
    await desk.until_serving("qwen", decode=1)
    (pod,) = await desk.pods("qwen")
    desk.cluster.simulated.crash(desk.namespace, pod["metadata"]["name"], line="CUDA error")  # type: ignore[attr-defined]
    await desk.eventually(lambda: desk.pods("qwen"), _restarted_and_ready, what="its container runs again")
    await desk.until_serving("qwen", decode=1)
    assert {pod["metadata"]["uid"]} == await desk.pod_uids("qwen")


async def test_a_pod_that_is_deleted_by_hand_is_made_again_in_the_same_replica(desk: Desk) -> None:
    await desk.create("qwen", decode={})
    await desk.until_serving("qwen", decode=1)
    (pod,) = await desk.pods("qwen")
    await desk.cluster.delete(PODS, desk.namespace, pod["metadata"]["name"])
    await desk.eventually(
        lambda: desk.pod_uids("qwen"), lambda uids: uids and pod["metadata"]["uid"] not in uids, what="another pod"
    )
    await desk.until_serving("qwen", decode=1)
    (again,) = await desk.pods("qwen")
    assert label(again, names.REPLICA_LABEL) == label(pod, names.REPLICA_LABEL)


def _restarted_and_ready(pods: list[dict[str, object]]) -> bool:
    (status,) = pods[0]["status"]["containerStatuses"]  # type: ignore[index]
    return bool(status["ready"]) and status["restartCount"] == 1
