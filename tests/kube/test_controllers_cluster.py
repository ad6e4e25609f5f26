"""The cluster as tests of the operator use it, both of them: the double, and any API server by its kubeconfig."""

from __future__ import annotations

from pathlib import Path

from tests.support.kube.cluster import FakeCluster
from tests.support.kube.kubelets.client import KubeHttp
from tests.support.kube.kubelets.samples import NAMESPACE, stateful_set
from tests.support.kube.real_cluster import KubeconfigCluster
from tests.support.kube.resources import CRDS, LEASES, NAMESPACES, NODES, SERVICES, STATEFULSETS, Resource

MODELS = Resource("antiphon.dev", "v1alpha1", "models", "Model", True)


async def test_the_charts_resources_are_served(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path) as cluster:
        await cluster.install_crds()
        await cluster.namespace(NAMESPACE, {"team": "chat"})
        model = {
            "apiVersion": MODELS.api_version,
            "kind": MODELS.kind,
            "metadata": {"name": "m", "namespace": NAMESPACE},
        }
        made = await cluster.create(MODELS, model | {"spec": {"source": {"uri": "demo"}}})
        assert made["spec"]["source"]["cache"] == {"type": "Ephemeral"}
        await cluster.install_crds()
        assert [each["metadata"]["name"] for each in await cluster.list(CRDS)] == [
            "models.antiphon.dev",
            "pools.antiphon.dev",
        ]


async def test_owned_objects_go_with_their_owner(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path) as cluster:
        await cluster.add_node("n-0")
        await cluster.namespace(NAMESPACE)
        owner = await cluster.create(STATEFULSETS, stateful_set("app", 1))
        reference = {key: owner["metadata"][key] for key in ("name", "uid")}
        reference |= {"apiVersion": "apps/v1", "kind": "StatefulSet"}
        service = {"metadata": {"name": "web", "namespace": NAMESPACE, "ownerReferences": [reference]}}
        await cluster.create(SERVICES, service | {"apiVersion": "v1", "kind": "Service", "spec": {"clusterIP": "None"}})
        await cluster.until_pods(NAMESPACE, ready=1)
        await cluster.delete(STATEFULSETS, NAMESPACE, "app")
        await cluster.until_pods(NAMESPACE, ready=0)

        async def gone() -> bool:
            return not await cluster.list(SERVICES, NAMESPACE)

        await cluster.eventually(gone)


async def test_a_namespace_goes_with_everything_in_it(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path) as cluster:
        await cluster.add_node("n-0")
        await cluster.namespace(NAMESPACE)
        await cluster.create(STATEFULSETS, stateful_set("app", 2))
        await cluster.until_pods(NAMESPACE, ready=2)
        await cluster.delete(NAMESPACES, "", NAMESPACE)

        async def gone() -> bool:
            return await cluster.get(NAMESPACES, "", NAMESPACE) is None

        await cluster.eventually(gone)
        await cluster.until_pods(NAMESPACE, ready=0)


async def test_nodes_are_added_to_any_control_plane_and_leave_nothing_behind(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path) as given:
        await given.add_node("its-own")
        async with KubeconfigCluster(given.kubeconfig, tmp_path / "test") as cluster:
            await cluster.add_node("ours", gpus=1)
            await cluster.namespace(NAMESPACE)
            made = stateful_set("app", 1)
            made["spec"]["template"]["spec"] |= cluster.pod_template
            await cluster.create(STATEFULSETS, made)
            [pod] = await cluster.until_pods(NAMESPACE, ready=1)
            assert pod["spec"]["nodeName"] == "ours"
            assert await cluster.get(LEASES, "kube-node-lease", "ours") is not None
        assert [each["metadata"]["name"] for each in await given.list(NODES)] == ["its-own"]
        assert await given.get(NAMESPACES, "", NAMESPACE) is None


async def test_who_asked_can_be_told_apart(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path) as cluster:
        async with KubeHttp(cluster.kubeconfig_for("operator")) as operator:
            await operator.list(NODES)
        assert [each.resource for each in cluster.server.requests.recent if each.user == "operator"] == ["nodes"]
