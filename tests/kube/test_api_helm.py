"""Helm, as it is, installs, upgrades, rolls back and removes the chart: on the double, or on the real API server that
`ANTIPHON_TEST_KUBECONFIG` names, where it needs rights to make cluster roles and CRDs.

On the double releases are kept in memory: Helm would write its release Secrets as protobuf, which it does not speak.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import pytest

from tests.support.kube.kubelets.client import KubeHttp
from tests.support.kube.real_cluster import given_kubeconfig
from tests.support.kube.resources import CRDS, DEPLOYMENTS, NAMESPACES, Resource
from tests.support.kube.server import KubeServer

CHART = Path(__file__).parents[2] / "charts" / "antiphon"
MODELS = Resource("antiphon.dev", "v1alpha1", "models", "Model", True)
KINDS = ("models.antiphon.dev", "pools.antiphon.dev")
RELEASE = "antiphon"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the chart is installed: a namespace of its own."""

    client: KubeHttp
    config: helm_python.Config
    namespace: str

    async def gateway_replicas(self) -> list[int]:
        found = (await self.client.list(DEPLOYMENTS, self.namespace))["items"]
        return [each["spec"]["replicas"] for each in found if "gateway" in each["metadata"]["name"]]

    async def adopt_kinds(self) -> None:
        """CRDs that are there without Helm would be refused: they are handed over as Helm asks for it."""
        owner = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": self.namespace}
        labels = {"app.kubernetes.io/managed-by": "Helm"}
        for name in KINDS:
            if await self.client.get(CRDS, "", name) is not None:
                await self.client.merge_patch(CRDS, "", name, {"metadata": {"annotations": owner, "labels": labels}})


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    given = given_kubeconfig()
    async with AsyncExitStack() as stack:
        if given is None:
            server = await stack.enter_async_context(KubeServer())
            stack.callback(lambda: _well(server))
            kubeconfig, driver = server.write_kubeconfig(tmp_path / "config"), "memory"
        else:
            kubeconfig, driver = given, "secret"
        client = await stack.enter_async_context(KubeHttp(kubeconfig))
        namespace = f"helm-{secrets.token_hex(4)}"
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        await client.create(NAMESPACES, "", body)
        stack.push_async_callback(client.delete, NAMESPACES, "", namespace)
        config = helm_python.Config(kubeconfig_path=kubeconfig, namespace=namespace, storage_driver=driver)
        yield Place(client, config, namespace)


def _well(server: KubeServer) -> None:
    assert server.failures == []


def chart_with_another_field(folder: Path) -> Path:
    """The chart as a later version might be: `spec.addedField` is new."""
    chart = shutil.copytree(CHART, folder / "antiphon")
    crd = chart / "templates" / "crds" / "models.yaml"
    lines = crd.read_text().splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if line.strip() == "maxContextTokens:")
    indent = lines[place][: -len(lines[place].lstrip())]
    lines.insert(place, f"{indent}addedField: {{type: string, default: new, maxLength: 8}}\n")
    crd.write_text("".join(lines))
    return chart


@pytest.mark.cluster
async def test_a_release_lives_and_its_kinds_outlive_it(place: Place, tmp_path: Path) -> None:
    async def helm(action: Any, *arguments: Any) -> None:
        await asyncio.to_thread(action, *arguments)

    client, config = place.client, place.config
    await place.adopt_kinds()
    await helm(config.install, CHART, RELEASE, {"gateway": {"replicas": 2}})
    assert await place.gateway_replicas() == [2]
    body = {
        "apiVersion": "antiphon.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": "demo"},
        "spec": {"source": {"uri": "demo"}},
    }
    model = await client.create(MODELS, place.namespace, body)
    assert "addedField" not in model["spec"]

    await helm(config.upgrade, chart_with_another_field(tmp_path), RELEASE, {"gateway": {"replicas": 3}})
    assert await place.gateway_replicas() == [3]
    touched = await client.merge_patch(MODELS, place.namespace, "demo", {"metadata": {"labels": {"a": "b"}}})
    assert touched["metadata"]["uid"] == model["metadata"]["uid"]
    assert touched["spec"]["addedField"] == "new"

    await helm(config.rollback, RELEASE)
    assert await place.gateway_replicas() == [2]

    await helm(config.uninstall, RELEASE)
    assert await place.gateway_replicas() == []
    for name in KINDS:
        assert await client.get(CRDS, "", name) is not None
    left = await client.get(MODELS, place.namespace, "demo")
    assert left is not None
    assert left["metadata"]["uid"] == model["metadata"]["uid"]
