"""Deployments, Jobs, disruption budgets, the scheduler and lost nodes in the double."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kube.cluster import FakeCluster
from tests.support.kube.controllers.podinfo import condition, is_ready, is_true
from tests.support.kube.kubelets.samples import NAMESPACE, container, deployment, job, pod, pod_spec, template
from tests.support.kube.resources import DEPLOYMENTS, EVENTS, JOBS, POD_DISRUPTION_BUDGETS, PODS, Resource

GPU = "nvidia.com/gpu"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path) as cluster:
        await cluster.add_node("n-0", gpus=2)
        await cluster.namespace(NAMESPACE)
        yield cluster


async def live(cluster: FakeCluster, resource: Resource, name: str) -> dict[str, Any]:
    found = await cluster.get(resource, NAMESPACE, name)
    assert found is not None
    return found


async def until_condition(cluster: FakeCluster, resource: Resource, name: str, kind: str) -> dict[str, Any]:
    async def holds() -> dict[str, Any] | None:
        found = await live(cluster, resource, name)
        return found if is_true(found, kind) else None

    found = await cluster.eventually(holds, what=f"{kind} of {name}")
    assert found is not None
    return found


def gpu_pod(name: str, count: int) -> dict[str, Any]:
    resources = {"requests": {GPU: str(count)}, "limits": {GPU: str(count)}}
    return pod(name, pod_spec(container(resources=resources)))


async def test_a_deployment_rolls_without_falling_below_what_it_promises(cluster: FakeCluster) -> None:
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    await cluster.create(DEPLOYMENTS, deployment("web", 2, strategy=strategy))
    await cluster.until_pods(NAMESPACE, ready=2)
    fewest: list[int] = []
    cluster.api.subscribe(lambda *_: fewest.append(sum(map(is_ready, cluster.api.list(PODS, NAMESPACE)))))
    changed = {"spec": {"template": template(pod_spec(container("app:2")), app="web")}}
    await cluster.client.merge_patch(DEPLOYMENTS, NAMESPACE, "web", changed)

    async def renewed() -> bool:
        pods = await cluster.pods(NAMESPACE)
        return [each["spec"]["containers"][0]["image"] for each in pods] == ["app:2"] * 2 and all(map(is_ready, pods))

    await cluster.eventually(renewed)
    assert min(fewest) >= 2

    async def told() -> bool:
        status = (await live(cluster, DEPLOYMENTS, "web"))["status"]
        return status["updatedReplicas"] == status["readyReplicas"] == status["replicas"] == 2

    await cluster.eventually(told)
    assert is_true(await live(cluster, DEPLOYMENTS, "web"), "Available")


async def test_a_job_completes_with_its_pods_termination_message(cluster: FakeCluster) -> None:
    says = {"test.antiphon.dev/termination-message": '{"commit": "abc"}'}
    await cluster.create(JOBS, job("fetch", template(app="fetch", annotations=says)))
    done = await until_condition(cluster, JOBS, "fetch", "Complete")
    assert done["status"]["succeeded"] == 1
    assert done["status"]["completionTime"]
    [ended] = await cluster.pods(NAMESPACE, "batch.kubernetes.io/job-name=fetch")
    assert ended["status"]["phase"] == "Succeeded"
    state = ended["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (state["exitCode"], state["message"], state["reason"]) == (0, '{"commit": "abc"}', "Completed")


async def test_a_job_is_tried_again_until_its_limit(cluster: FakeCluster) -> None:
    await cluster.create(JOBS, job("fetch", template(pod_spec(container("app:crash")), app="fetch"), backoffLimit=1))
    failed = await until_condition(cluster, JOBS, "fetch", "Failed")
    why = condition(failed, "Failed")
    assert why is not None
    assert why["reason"] == "BackoffLimitExceeded"
    assert failed["status"]["failed"] == 2
    assert [each["status"]["phase"] for each in await cluster.pods(NAMESPACE)] == ["Failed", "Failed"]


async def test_an_exit_code_that_no_try_can_cure_fails_the_job_at_once(cluster: FakeCluster) -> None:
    on_exit = {"containerName": "main", "operator": "In", "values": [2]}
    made_of = template(app="fetch", annotations={"test.antiphon.dev/exit-code": "2"})
    policy = {"rules": [{"action": "FailJob", "onExitCodes": on_exit}]}
    await cluster.create(JOBS, job("fetch", made_of, podFailurePolicy=policy))
    why = condition(await until_condition(cluster, JOBS, "fetch", "Failed"), "Failed")
    assert why is not None
    assert why["reason"] == "PodFailurePolicy"
    assert "failed with exit code 2 matching FailJob rule at index 0" in why["message"]


async def test_a_budget_says_how_many_may_go(cluster: FakeCluster) -> None:
    await cluster.create(DEPLOYMENTS, deployment("web", 3))
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "web", "namespace": NAMESPACE},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "web"}}},
    }
    await cluster.create(POD_DISRUPTION_BUDGETS, budget)

    async def counted() -> bool:
        status = (await live(cluster, POD_DISRUPTION_BUDGETS, "web")).get("status") or {}
        return status.get("currentHealthy") == 3

    await cluster.eventually(counted)
    status = (await live(cluster, POD_DISRUPTION_BUDGETS, "web"))["status"]
    assert (status["expectedPods"], status["desiredHealthy"], status["disruptionsAllowed"]) == (3, 2, 1)


async def test_a_pod_that_does_not_fit_says_why_and_is_placed_when_there_is_room(cluster: FakeCluster) -> None:
    await cluster.create(PODS, gpu_pod("first", 2))
    await cluster.until_pods(NAMESPACE, ready=1)
    await cluster.create(PODS, gpu_pod("second", 1))

    async def refused() -> str:
        found = condition(await live(cluster, PODS, "second"), "PodScheduled")
        return str(found["message"]) if found is not None and found["reason"] == "Unschedulable" else ""

    assert (await cluster.eventually(refused)).startswith("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    assert "FailedScheduling" in [event["reason"] for event in await cluster.list(EVENTS, NAMESPACE)]
    await cluster.delete(PODS, NAMESPACE, "first")
    [placed] = await cluster.until_pods(NAMESPACE, ready=1)
    assert placed["metadata"]["name"] == "second"
    await cluster.create(PODS, gpu_pod("third", 2))
    await cluster.add_node("n-1", gpus=2)
    await cluster.until_pods(NAMESPACE, ready=2)


async def test_pods_of_a_deleted_node_are_removed(cluster: FakeCluster) -> None:
    await cluster.create(PODS, pod("alone"))
    await cluster.until_pods(NAMESPACE, ready=1)
    await cluster.delete_node("n-0")
    await cluster.until_pods(NAMESPACE, ready=0)
