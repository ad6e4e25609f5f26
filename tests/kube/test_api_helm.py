"""Helm, as it is, installs, upgrades, rolls back and removes the chart on the double.

Releases are kept in memory: Helm would write its release Secrets as protobuf, which the double does not speak.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import helm_python
import pytest

from tests.support.kube.resources import CRDS, DEPLOYMENTS, Resource
from tests.support.kube.server import KubeServer

CHART = Path(__file__).parents[2] / "charts" / "antiphon"
MODELS = Resource("antiphon.dev", "v1alpha1", "models", "Model", True)


@pytest.fixture
async def server() -> AsyncIterator[KubeServer]:
    async with KubeServer() as running:
        yield running
    assert running.failures == []


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


def gateway_replicas(server: KubeServer) -> list[int]:
    return [each["spec"]["replicas"] for each in server.api.list(DEPLOYMENTS) if "gateway" in each["metadata"]["name"]]


async def test_a_release_lives_and_its_kinds_outlive_it(server: KubeServer, tmp_path: Path) -> None:
    config = helm_python.Config(
        kubeconfig_path=server.write_kubeconfig(tmp_path / "config"), namespace="default", storage_driver="memory"
    )

    async def helm(action: Any, *arguments: Any) -> None:
        await asyncio.to_thread(action, *arguments)

    await helm(config.install, CHART, "antiphon", {"gateway": {"replicas": 2}})
    assert gateway_replicas(server) == [2]
    model = server.api.create(MODELS, "default", {"metadata": {"name": "demo"}, "spec": {"source": {"uri": "demo"}}})
    assert "addedField" not in model["spec"]

    await helm(config.upgrade, chart_with_another_field(tmp_path), "antiphon", {"gateway": {"replicas": 3}})
    assert gateway_replicas(server) == [3]
    touched = server.api.merge_patch(MODELS, "default", "demo", {"metadata": {"labels": {"a": "b"}}})
    assert touched["metadata"]["uid"] == model["metadata"]["uid"]
    assert touched["spec"]["addedField"] == "new"

    await helm(config.rollback, "antiphon")
    assert gateway_replicas(server) == [2]

    await helm(config.uninstall, "antiphon")
    assert server.api.list(DEPLOYMENTS) == []
    kinds = [each["metadata"]["name"] for each in server.api.list(CRDS)]
    assert kinds == ["models.antiphon.dev", "pools.antiphon.dev"]
    assert server.api.get(MODELS, "default", "demo")["metadata"]["uid"] == model["metadata"]["uid"]
