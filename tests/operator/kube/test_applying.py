"""Objects of whole Models on the test API server: applied once, then left alone, put back when a hand changed them."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from antiphon_operator.kube.applying import ensure
from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.drift import changed_fields
from antiphon_operator.kube.errors import NotFound
from antiphon_operator.kube.resources import SERVICES, STATEFUL_SETS, resource_of
from antiphon_operator.names import DRAINING_SINCE_ANNOTATION

from tests.support.kube.resources import NAMESPACES
from tests.support.kube.server import KubeServer
from tests.support.rendered import SPECS, render

IMMUTABLE = ("StatefulSet", "ControllerRevision", "Job")


@dataclass(frozen=True)
class Wanted:
    manifest: dict[str, Any]

    @property
    def create_only(self) -> bool:
        return self.manifest["kind"] in IMMUTABLE


@pytest.fixture
async def server() -> AsyncIterator[KubeServer]:
    async with KubeServer() as served:
        served.api.create(NAMESPACES, None, {"metadata": {"name": "chat"}})
        yield served


@pytest.fixture
async def client(server: KubeServer, tmp_path: Path) -> AsyncIterator[KubeClient]:
    opened = KubeClient.connect(str(server.write_kubeconfig(tmp_path / "kubeconfig")))
    yield opened
    await opened.close()


async def live(client: KubeClient, manifest: dict[str, Any]) -> Any:
    resource = resource_of(manifest["apiVersion"], manifest["kind"])
    return await client.get(resource, manifest["metadata"]["namespace"], manifest["metadata"]["name"])


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
async def test_what_was_applied_once_needs_nothing_more(
    server: KubeServer, client: KubeClient, spec: dict[str, Any]
) -> None:
    manifests = [each for each in render(spec).manifests if each["kind"] not in ("Pool", "PodMonitor")]
    assert len(manifests) > 5
    for manifest in manifests:
        assert await ensure(client, Wanted(manifest), None) is not None
    held = [await live(client, manifest) for manifest in manifests]
    before = server.requests.total
    for manifest, there in zip(manifests, held, strict=True):
        assert changed_fields(Wanted(manifest), there) == []
        assert await ensure(client, Wanted(manifest), there) is None, manifest["kind"]
    assert server.requests.total == before
    assert server.failures == []


async def test_a_hand_edit_is_put_back_and_fields_of_others_stay(client: KubeClient) -> None:
    manifest = next(each for each in render(SPECS["demo"]).manifests if each["kind"] == "Service")
    await ensure(client, Wanted(manifest), None)
    name = manifest["metadata"]["name"]
    patch = {"metadata": {"labels": {"theirs": "x"}}, "spec": {"publishNotReadyAddresses": False}}
    edited = await client.merge_patch(SERVICES, "chat", name, patch)
    assert changed_fields(Wanted(manifest), edited) == ["spec.publishNotReadyAddresses"]
    put_back = await ensure(client, Wanted(manifest), edited)
    assert put_back is not None
    assert put_back["spec"]["publishNotReadyAddresses"] is True
    assert put_back["metadata"]["labels"]["theirs"] == "x"
    assert await ensure(client, Wanted(manifest), put_back) is None


async def test_a_label_that_is_not_wanted_any_more_goes(client: KubeClient) -> None:
    manifest = next(each for each in render(SPECS["demo"]).manifests if each["kind"] == "Service")
    more = copy.deepcopy(manifest)
    more["metadata"]["labels"]["antiphon.dev/once"] = "wanted"
    there = await ensure(client, Wanted(more), None)
    after = await ensure(client, Wanted(manifest), there)
    assert after is not None
    assert "antiphon.dev/once" not in after["metadata"]["labels"]


async def test_a_replica_that_is_marked_keeps_its_fields_whatever_a_newer_operator_would_render(
    client: KubeClient,
) -> None:
    manifest = next(each for each in render(SPECS["demo"]).manifests if each["kind"] == "StatefulSet")
    made = await ensure(client, Wanted(manifest), None)
    assert made is not None
    marked = copy.deepcopy(manifest)
    marked["metadata"].setdefault("annotations", {})[DRAINING_SINCE_ANNOTATION] = "2026-01-01T00:00:00Z"
    marked["spec"]["template"]["spec"]["containers"][0]["image"] = "newer"
    after = await ensure(client, Wanted(marked), made)
    assert after is not None
    assert after["metadata"]["annotations"][DRAINING_SINCE_ANNOTATION] == "2026-01-01T00:00:00Z"
    assert after["spec"] == made["spec"]
    assert await ensure(client, Wanted(marked), after) is None
    unmarked = await ensure(client, Wanted(manifest), after)
    assert unmarked is not None
    assert DRAINING_SINCE_ANNOTATION not in unmarked["metadata"].get("annotations", {})


async def test_a_delete_hits_the_object_with_that_uid_and_no_namesake(client: KubeClient) -> None:
    manifest = next(each for each in render(SPECS["demo"]).manifests if each["kind"] == "StatefulSet")
    made = await ensure(client, Wanted(manifest), None)
    assert made is not None
    name = manifest["metadata"]["name"]
    await client.delete(STATEFUL_SETS, "chat", name, uid="of another")
    assert (await live(client, manifest))["metadata"]["uid"] == made["metadata"]["uid"]
    await client.delete(STATEFUL_SETS, "chat", name, uid=made["metadata"]["uid"])
    with pytest.raises(NotFound):
        await live(client, manifest)
    await client.delete(STATEFUL_SETS, "chat", name, uid=made["metadata"]["uid"])
