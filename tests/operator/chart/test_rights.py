"""The operator's process against the chart's roles: all that it asks for is granted, and all that is granted is needed.

A real process with the real planner lives through creation, a crash, rollout, scaling and deletion, on the double of an
API server, which checks no rights but notes every request.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from antiphon_operator import names
from antiphon_operator.kube import resources

from tests.support import chart
from tests.support.granted import CLUSTER, Right, needed_for, rights_of
from tests.support.kube.cluster import FakeCluster
from tests.support.kube.kubelets.simulated import Script
from tests.support.kube.operator_process import OperatorProcess
from tests.support.kube.requests import Request
from tests.support.kube.resources import (
    CRDS,
    JOBS,
    NETWORK_POLICIES,
    SERVICE_ACCOUNTS,
    STATEFULSETS,
    Resource,
)
from tests.support.kube_in_process import served
from tests.support.valkey import Valkey

MODELS, POOLS = served(resources.MODELS), served(resources.POOLS)
HOME = "antiphon"
"""Where the chart is installed."""
ACCOUNT = "antiphon-operator"
USER = "the-operator"
SCOPES: dict[str, list[str]] = {"whole cluster": [], "listed namespaces": ["chat"]}
FOUND = {"revision": "0" * 40, "size_bytes": 1, "path": f"/models/some--model-{'0' * 40}"}

NOT_SEEN_HERE: dict[tuple[str, str], str] = {
    ("get", "events"): "an Event that comes again is counted up, at most once a minute",
    ("patch", "events"): "likewise",
}
"""Rights that the operator needs although it does not use them in this test, and why it does not."""


class Life:
    """Of a few Models, from creation to deletion, with what goes wrong in between."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    async def create(self, name: str, **spec: Any) -> None:
        body = {"apiVersion": names.API_VERSION, "kind": "Model", "metadata": {"name": name, "namespace": "chat"}}
        spec = {"source": {"uri": "demo"}, "decode": {}, "rollout": {"drainTimeout": "1s"}} | spec
        await self.cluster.create(MODELS, {**body, "spec": spec})

    async def edit(self, name: str, **spec: Any) -> None:
        await self.cluster.client.merge_patch(MODELS, "chat", name, {"spec": spec})

    async def until(self, name: str, condition: str, status: str, reason: str = "") -> None:
        def holds() -> bool:
            model = self.cluster.api.peek(MODELS, "chat", name)
            return (model.get("status") or {}).get("observedGeneration") == model["metadata"]["generation"] and any(
                told["type"] == condition and told["status"] == status and reason in ("", told["reason"])
                for told in model["status"].get("conditions") or ()
            )

        await self.cluster.eventually(holds, what=f"{name}: {condition}={status} {reason}")

    async def live(self) -> None:
        """All but the end."""
        fetched = Script(end_s=0.02, ready_s=None, message=json.dumps(FOUND))
        self.cluster.simulated.hook = lambda pod, container: fetched if container["name"] == "fetch" else None
        await self.create("qwen", prefill={}, engine={"image": "crash:1"}, autoscaling={"mode": "External"})
        await self.until("qwen", "Ready", "False", "EngineCrash")
        await self.edit("qwen", engine={"image": "worker:1"})
        await self.until("qwen", "RolloutComplete", "True", "Complete")
        for replicas in (3, 1):
            patch = {"spec": {"replicas": replicas}}
            await self.cluster.client.merge_patch(POOLS, "chat", "qwen-decode", patch, subresource="scale")
            await self.until_there(STATEFULSETS, "qwen-decode", replicas)
        await self.edit("qwen", prefill=None)
        await self.until_there(POOLS, "qwen-prefill", 0)
        await self.create("hub", source={"uri": "hf://some/model"}, accelerator={"resource": "none"})
        await self.until("hub", "Ready", "True")
        await self.edit("hub", source={"revision": "v2"})
        await self.until_there(JOBS, "hub", 1)
        await self.edit("hub", decode={"replicas": 0})
        await self.until_there(STATEFULSETS, "hub", 0)
        await self.edit("hub", serviceAccountName="default")
        await self.until_there(SERVICE_ACCOUNTS, "hub", 0)

    async def switch_off(self) -> None:
        """Of an operator that makes no network policies: those that are there go."""
        await self.until_there(NETWORK_POLICIES, "qwen", 0)

    async def end(self) -> None:
        for name in ("qwen", "hub"):
            await self.cluster.delete(MODELS, "chat", name)
        await self.until_there(STATEFULSETS, "", 0)

    async def until_there(self, resource: Resource, prefix: str, count: int) -> None:
        def found() -> int:
            things = [thing["metadata"]["name"] for thing in self.cluster.api.select(resource, "chat")]
            return len([name for name in things if name.startswith(prefix)])

        await self.cluster.eventually(lambda: found() == count, what=f"{count} {resource.plural} {prefix}")


def pod_monitor_crd() -> dict[str, Any]:
    """As small as it can be."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "podmonitors.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "scope": "Namespaced",
            "names": {
                "plural": "podmonitors",
                "singular": "podmonitor",
                "kind": "PodMonitor",
                "listKind": "PodMonitorList",
            },
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }


async def requests_of(folder: Path, namespaces: list[str]) -> list[Request]:
    """All that operators ask the API server for, all their lives."""
    key = folder / "key"
    key.write_text("a key of the chart's, long enough")
    listed = [word for namespace in namespaces for word in ("--namespaces", namespace)]
    async with FakeCluster(folder) as cluster:
        await cluster.install_crds()
        await cluster.create(CRDS, pod_monitor_crd())
        for namespace in ("chat", HOME):
            await cluster.namespace(namespace)
        await cluster.add_node("node-0")
        life = Life(cluster)
        with Valkey() as valkey:

            def operator(name: str, *options: str) -> OperatorProcess:
                return OperatorProcess(
                    cluster.kubeconfig_for(USER),
                    folder,
                    *listed,
                    "--pod-monitors",
                    *options,
                    name=name,
                    redis_url=valkey.url,
                    credentials_key_file=key,
                    lease_namespace=HOME,
                )

            async with operator("first") as first:
                await first.until_acting()
                await life.live()
                await first.stop()
            async with operator("second", "--no-network-policies") as second:
                await life.switch_off()
                await life.end()
                await second.stop()
        return [request for request in cluster.api.requests.since(0) if request.user == USER]


@pytest.mark.parametrize("namespaces", SCOPES.values(), ids=SCOPES)
async def test_all_that_it_asks_for_is_granted_and_all_that_is_granted_is_needed(
    tmp_path: Path, namespaces: list[str]
) -> None:
    values = {"operator": {"watchNamespaces": namespaces, "podMonitors": True}}
    rights = rights_of(chart.render(values, namespace=HOME), ACCOUNT)
    needed = {right for request in await requests_of(tmp_path, namespaces) for right in needed_for(request)}
    refused = [need for need in needed if not any(right.covers(need) for right in rights)]
    assert refused == []
    idle = [right for right in rights if not any(right.covers(need) for need in needed)]
    assert {(right.verb, right.resource) for right in idle} == NOT_SEEN_HERE.keys()


def test_a_right_covers_what_it_names_and_nothing_else() -> None:
    everywhere, here = Right("get", "", "pods", CLUSTER), Right("get", "", "pods", "chat")
    named = Right("get", "", "pods", "chat", frozenset({"a"}))
    assert everywhere.covers(here)
    assert here.covers(named)
    assert not here.covers(everywhere), "a listing of all namespaces needs a right in all of them"
    assert not named.covers(here)
    assert not here.covers(Right("get", "", "pods/log", "chat"))
    assert not here.covers(Right("get", "apps", "pods", "chat"))
    assert not here.covers(Right("get", "", "pods", "lab"))
