"""StatefulSets of the double behave as real ones do, as far as the operator can tell."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kube.cluster import FakeCluster
from tests.support.kube.controllers.podinfo import is_ready, is_terminating
from tests.support.kube.kubelets.samples import NAMESPACE, container, pod_spec, stateful_set, template
from tests.support.kube.resources import CONTROLLER_REVISIONS, EVENTS, PODS, RESOURCE_QUOTAS, STATEFULSETS


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path) as cluster:
        await cluster.add_node("n-0", gpus=8)
        await cluster.namespace(NAMESPACE)
        yield cluster


def names(pods: list[dict[str, Any]]) -> list[str]:
    return [pod["metadata"]["name"] for pod in pods]


async def status_of(cluster: FakeCluster, name: str) -> dict[str, Any]:
    found = await cluster.get(STATEFULSETS, NAMESPACE, name)
    assert found is not None
    return found.get("status") or {}


async def test_pods_have_ordinals_labels_and_an_owner(cluster: FakeCluster) -> None:
    made = await cluster.create(STATEFULSETS, stateful_set("app", 2, podManagementPolicy="Parallel"))
    pods = await cluster.until_pods(NAMESPACE, ready=2)
    assert names(pods) == ["app-0", "app-1"]
    labels = pods[1]["metadata"]["labels"]
    assert labels["app"] == "app"
    assert labels["statefulset.kubernetes.io/pod-name"] == "app-1"
    assert labels["apps.kubernetes.io/pod-index"] == "1"
    assert (pods[1]["spec"]["hostname"], pods[1]["spec"]["subdomain"]) == ("app-1", "app-pods")
    assert pods[1]["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"]

    async def settled() -> bool:
        return (await status_of(cluster, "app")).get("readyReplicas") == 2

    await cluster.eventually(settled)
    status = await status_of(cluster, "app")
    assert (status["replicas"], status["availableReplicas"]) == (2, 2)
    assert status["currentRevision"] == status["updateRevision"] == labels["controller-revision-hash"]
    assert names(await cluster.list(CONTROLLER_REVISIONS, NAMESPACE)) == [status["currentRevision"]]


async def test_a_rollout_is_told_in_several_changes(cluster: FakeCluster) -> None:
    seen: list[int] = []

    def listen(kind: str, resource: object, thing: dict[str, Any]) -> None:
        if resource == STATEFULSETS and kind == "MODIFIED":
            seen.append(thing["status"].get("readyReplicas", 0))

    cluster.api.subscribe(listen)
    await cluster.create(STATEFULSETS, stateful_set("app", 3))
    await cluster.until_pods(NAMESPACE, ready=3)
    await cluster.eventually(lambda: seen[-1] == 3)
    assert len(seen) >= 4
    assert seen == sorted(seen)


async def test_ordered_pods_wait_for_each_other_and_parallel_ones_do_not(cluster: FakeCluster) -> None:
    slow = {"test.antiphon.dev/ready-after-s": "never"}
    await cluster.create(STATEFULSETS, stateful_set("ordered", 2, template(app="ordered", annotations=slow)))
    parallel = stateful_set("parallel", 2, template(app="parallel", annotations=slow), podManagementPolicy="Parallel")
    await cluster.create(STATEFULSETS, parallel)

    async def all_run() -> bool:
        pods = await cluster.pods(NAMESPACE, "app=parallel")
        return len(pods) == 2 and all(pod["status"].get("phase") == "Running" for pod in pods)

    await cluster.eventually(all_run)
    assert names(await cluster.pods(NAMESPACE, "app=ordered")) == ["ordered-0"]


async def test_scaling_down_takes_the_highest(cluster: FakeCluster) -> None:
    await cluster.create(STATEFULSETS, stateful_set("app", 3, podManagementPolicy="Parallel"))
    await cluster.until_pods(NAMESPACE, ready=3)
    await cluster.client.merge_patch(STATEFULSETS, NAMESPACE, "app", {"spec": {"replicas": 1}})
    assert names(await cluster.until_pods(NAMESPACE, ready=1)) == ["app-0"]


async def test_a_changed_template_rolls_from_the_top(cluster: FakeCluster) -> None:
    await cluster.create(STATEFULSETS, stateful_set("app", 2))
    await cluster.until_pods(NAMESPACE, ready=2)
    deleted: list[str] = []

    def listen(kind: str, resource: object, thing: dict[str, Any]) -> None:
        if resource == PODS and kind == "DELETED":
            deleted.append(thing["metadata"]["name"])

    cluster.api.subscribe(listen)
    changed = {"spec": {"template": template(pod_spec(container("app:2")))}}
    await cluster.client.merge_patch(STATEFULSETS, NAMESPACE, "app", changed)

    async def renewed() -> bool:
        pods = await cluster.pods(NAMESPACE)
        images = [pod["spec"]["containers"][0]["image"] for pod in pods]
        return images == ["app:2", "app:2"] and all(map(is_ready, pods))

    await cluster.eventually(renewed)
    assert deleted == ["app-1", "app-0"]


async def test_a_pod_on_a_lost_node_stays_and_is_not_replaced(cluster: FakeCluster) -> None:
    await cluster.add_node("n-1")
    tolerates = [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
        for key in ("unreachable", "not-ready")
    ]
    made_of = template(pod_spec(tolerations=tolerates, nodeSelector={"kubernetes.io/hostname": "n-1"}))
    await cluster.create(STATEFULSETS, stateful_set("app", 1, made_of))
    [before] = await cluster.until_pods(NAMESPACE, ready=1)
    await cluster.lose_node("n-1")

    async def terminating() -> bool:
        [pod] = await cluster.pods(NAMESPACE)
        return is_terminating(pod) and not is_ready(pod)

    await cluster.eventually(terminating)
    await cluster.client.merge_patch(  # something for the controller to look at, after which nothing may have changed
        STATEFULSETS, NAMESPACE, "app", {"metadata": {"annotations": {"looked-at": "yes"}}}
    )
    await cluster.create(STATEFULSETS, stateful_set("other", 1, template(app="other")))
    await cluster.until_pods(NAMESPACE, "app=other", ready=1)
    [pod] = await cluster.pods(NAMESPACE, "app=app")
    assert pod["metadata"]["uid"] == before["metadata"]["uid"]
    await cluster.heal_node("n-1")

    async def replaced() -> bool:
        pods = await cluster.pods(NAMESPACE, "app=app")
        return len(pods) == 1 and pods[0]["metadata"]["uid"] != before["metadata"]["uid"] and is_ready(pods[0])

    await cluster.eventually(replaced)


async def test_a_refused_pod_is_told_in_an_event_and_tried_again(cluster: FakeCluster) -> None:
    quota = {"metadata": {"name": "few", "namespace": NAMESPACE}, "spec": {"hard": {"pods": "1"}}}
    await cluster.create(RESOURCE_QUOTAS, {"apiVersion": "v1", "kind": "ResourceQuota", **quota})
    await cluster.create(STATEFULSETS, stateful_set("app", 2, podManagementPolicy="Parallel"))

    async def told() -> list[dict[str, Any]]:
        return [event for event in await cluster.list(EVENTS, NAMESPACE) if event["reason"] == "FailedCreate"]

    [event] = await cluster.eventually(told)
    assert event["type"] == "Warning"
    assert event["involvedObject"]["name"] == "app"
    assert event["message"].startswith('create Pod app-1 in StatefulSet app failed error: pods "app-1" is forbidden: ')
    assert "exceeded quota: few" in event["message"]
    await cluster.client.merge_patch(RESOURCE_QUOTAS, NAMESPACE, "few", {"spec": {"hard": {"pods": "2"}}})
    await cluster.until_pods(NAMESPACE, ready=2)
