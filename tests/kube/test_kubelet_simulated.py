"""Pods that pretend: their states, failures and ends look as a real kubelet's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kube.cluster import FakeCluster
from tests.support.kube.controllers.podinfo import is_ready, is_true
from tests.support.kube.kubelets.samples import NAMESPACE, container, pod, pod_spec
from tests.support.kube.kubelets.simulated import Script
from tests.support.kube.resources import PODS


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path) as cluster:
        await cluster.add_node("n-0")
        await cluster.namespace(NAMESPACE)
        yield cluster


async def until_waiting(cluster: FakeCluster, name: str, reason: str) -> dict[str, Any]:
    """The container's status once it waits for this reason."""

    async def found() -> dict[str, Any] | None:
        live = await cluster.get(PODS, NAMESPACE, name)
        [status] = ((live or {}).get("status") or {}).get("containerStatuses") or [{}]
        return status if (status.get("state") or {}).get("waiting", {}).get("reason") == reason else None

    status = await cluster.eventually(found, what=f"{name} waits for {reason}")
    assert status is not None
    return status


async def test_a_pod_comes_up_step_by_step(cluster: FakeCluster) -> None:
    seen: list[tuple[str, bool]] = []

    def listen(kind: str, resource: object, thing: dict[str, Any]) -> None:
        if resource == PODS:
            now = thing["status"].get("phase", "Pending"), is_ready(thing)
            if now not in seen[-1:]:
                seen.append(now)

    cluster.api.subscribe(listen)
    await cluster.create(PODS, pod("one"))
    [live] = await cluster.until_pods(NAMESPACE, ready=1)
    assert seen == [("Pending", False), ("Running", False), ("Running", True)]
    assert live["status"]["podIP"].startswith("10.")
    assert all(is_true(live, kind) for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready"))


async def test_a_missing_image(cluster: FakeCluster) -> None:
    await cluster.create(PODS, pod("one", pod_spec(container("missing:1"))))
    status = await until_waiting(cluster, "one", "ImagePullBackOff")
    assert status["state"]["waiting"]["message"].startswith('Back-off pulling image "missing:1"')


async def test_a_crashing_container(cluster: FakeCluster) -> None:
    await cluster.create(PODS, pod("one", pod_spec(container("crash:1"))))
    status = await until_waiting(cluster, "one", "CrashLoopBackOff")
    assert status["restartCount"] >= 1
    assert status["lastState"]["terminated"]["exitCode"] == 1
    assert status["lastState"]["terminated"]["message"] == "RuntimeError: the engine could not start"
    assert status["state"]["waiting"]["message"].startswith(
        "back-off 10s restarting failed container=main pod=one_test("
    )
    assert cluster.kubelet.log(NAMESPACE, "one") == "RuntimeError: the engine could not start\n"


async def test_a_container_that_runs_again_tells_of_its_end_before_also_after_a_back_off(
    cluster: FakeCluster,
) -> None:
    seen: list[dict[str, Any]] = []

    def listen(kind: str, resource: object, thing: dict[str, Any]) -> None:
        statuses = (thing.get("status") or {}).get("containerStatuses") if resource == PODS else None
        if statuses and statuses[0]["restartCount"] == 2 and "running" in statuses[0]["state"]:
            seen.append(statuses[0]["lastState"])

    cluster.api.subscribe(listen)
    await cluster.create(PODS, pod("one", pod_spec(container("crash:1"))))
    await cluster.eventually(lambda: seen, what="the second restart")
    assert seen[0]["terminated"]["exitCode"] == 1


async def test_the_log_is_served_by_the_api(cluster: FakeCluster) -> None:
    await cluster.create(PODS, pod("one"))
    await cluster.until_pods(NAMESPACE, ready=1)
    assert await cluster.client.log(NAMESPACE, "one", "main") == "started\n"


async def test_a_hook_decides_what_a_pod_does_and_a_test_makes_it_crash(cluster: FakeCluster) -> None:
    cluster.simulated.hook = lambda pod, container: Script(ready_s=None) if pod["metadata"]["name"] == "one" else None
    await cluster.create(PODS, pod("one"))

    async def runs() -> bool:
        live = await cluster.get(PODS, NAMESPACE, "one")
        return live is not None and live["status"].get("phase") == "Running"

    await cluster.eventually(runs)
    cluster.simulated.set_ready(NAMESPACE, "one", True)
    await cluster.until_pods(NAMESPACE, ready=1)
    cluster.simulated.crash(NAMESPACE, "one", line="Killed")

    async def restarted() -> bool:
        live = await cluster.get(PODS, NAMESPACE, "one")
        return live is not None and live["status"]["containerStatuses"][0]["restartCount"] == 1

    await cluster.eventually(restarted)
    assert cluster.kubelet.log(NAMESPACE, "one", previous=True) == "started\nKilled\n"


async def test_a_deleted_pod_ends_in_its_own_time_and_within_its_grace(cluster: FakeCluster) -> None:
    stubborn = {"test.antiphon.dev/stop-after-s": "60"}
    await cluster.create(PODS, pod("stubborn", pod_spec(terminationGracePeriodSeconds=1), annotations=stubborn))
    await cluster.create(PODS, pod("polite"))
    await cluster.until_pods(NAMESPACE, ready=2)
    codes: dict[str, int] = {}

    def listen(kind: str, resource: object, thing: dict[str, Any]) -> None:
        if resource == PODS and "terminated" in thing["status"]["containerStatuses"][0]["state"]:
            codes[thing["metadata"]["name"]] = thing["status"]["containerStatuses"][0]["state"]["terminated"][
                "exitCode"
            ]

    cluster.api.subscribe(listen)
    await cluster.delete(PODS, NAMESPACE, "stubborn")
    await cluster.delete(PODS, NAMESPACE, "polite")
    await cluster.until_pods(NAMESPACE, ready=0)
    assert codes == {"stubborn": 137, "polite": 0}


async def test_a_frozen_node_confirms_nothing_until_it_thaws(cluster: FakeCluster) -> None:
    await cluster.create(PODS, pod("one"))
    await cluster.until_pods(NAMESPACE, ready=1)
    cluster.freeze_node("n-0")
    await cluster.delete(PODS, NAMESPACE, "one")
    await cluster.add_node("n-1")
    await cluster.create(PODS, pod("two", pod_spec(nodeSelector={"kubernetes.io/hostname": "n-1"})))
    await cluster.until_pods(NAMESPACE, "app=two", ready=1)
    assert await cluster.get(PODS, NAMESPACE, "one") is not None
    await cluster.heal_node("n-0")
    await cluster.until_pods(NAMESPACE, "app=one", ready=0)
