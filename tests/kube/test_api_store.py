"""What the double keeps and counts: copies, owners of fields, requests, quotas, logs; many objects are no trouble."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.kube import cel
from tests.support.kube.api import Api, ApiError
from tests.support.kube.resources import (
    CONFIG_MAPS,
    CRDS,
    LEASES,
    NAMESPACES,
    PODS,
    RESOURCE_QUOTAS,
    SECRETS,
    SERVICE_ACCOUNTS,
    STATEFULSETS,
    Resource,
)
from tests.support.kube.schema import custom_schema
from tests.support.kube.server import KubeServer
from tests.support.kube.wire import Wire

ROOT = Path(__file__).parents[2]
CRD_FOLDER = ROOT / "charts" / "antiphon" / "templates" / "crds"
MODELS = Resource("antiphon.dev", "v1alpha1", "models", "Model", True)
MAPS = "/api/v1/namespaces/default/configmaps"


def pod(name: str, **container: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"containers": [{"name": "main", "image": "x", **container}]}}


def stateful_set(name: str, **spec: Any) -> dict[str, Any]:
    template = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [{"name": "main", "image": "x"}]}}
    fixed = {"serviceName": name, "selector": {"matchLabels": {"app": name}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name}, "spec": fixed | spec}


def test_what_comes_out_is_a_copy() -> None:
    api = Api()
    body = {"metadata": {"name": "a"}, "data": {"k": "v"}}
    made = api.create(CONFIG_MAPS, "default", body)
    made["data"]["k"] = body["data"]["k"] = "changed"
    api.list(CONFIG_MAPS, "default")[0]["data"] = {}
    assert api.get(CONFIG_MAPS, "default", "a")["data"] == {"k": "v"}


def test_a_status_of_a_controller_does_not_take_fields_from_who_applied() -> None:
    api = Api()
    api.apply(STATEFULSETS, "default", "s", stateful_set("s", replicas=2), manager="operator")
    api.merge_patch(
        STATEFULSETS, "default", "s", {"status": {"replicas": 2}}, subresource="status", manager="controller"
    )
    live = api.get(STATEFULSETS, "default", "s")
    managers = {(each["manager"], each["operation"], each.get("subresource", "")) for each in managed(live)}
    assert managers == {("operator", "Apply", ""), ("controller", "Update", "status")}
    assert api.apply(STATEFULSETS, "default", "s", stateful_set("s", replicas=2), manager="operator") == live


def test_whoever_changed_a_field_owns_it_and_nothing_else() -> None:
    api = Api()
    api.apply(STATEFULSETS, "default", "s", stateful_set("s", replicas=2), manager="operator")
    api.merge_patch(STATEFULSETS, "default", "s", {"spec": {"replicas": 3}}, manager="hand")
    by_manager = {each["manager"]: each["fieldsV1"] for each in managed(api.get(STATEFULSETS, "default", "s"))}
    assert by_manager["hand"] == {"f:spec": {"f:replicas": {}}}
    assert "f:replicas" not in by_manager["operator"]["f:spec"]
    assert "f:template" in by_manager["operator"]["f:spec"]


def test_containers_and_their_variables_merge_by_name() -> None:
    api = Api()
    first, second = stateful_set("s"), stateful_set("s")
    second["spec"] = {"template": {"spec": {"containers": [{"name": "main", "env": [{"name": "B", "value": "2"}]}]}}}
    first["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": "A", "value": "1"}]
    api.apply(STATEFULSETS, "default", "s", first, manager="operator")
    both = api.apply(STATEFULSETS, "default", "s", second, manager="webhook")
    assert variables(both) == ["A", "B"]
    del first["spec"]["template"]["spec"]["containers"][0]["env"]
    assert variables(api.apply(STATEFULSETS, "default", "s", first, manager="operator")) == ["B"]


def test_finalizers_and_owners_are_owned_one_by_one() -> None:
    api = Api()
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "finalizers": ["antiphon.dev/one"]}}
    api.apply(CONFIG_MAPS, "default", "a", body, manager="first")
    body["metadata"] = {"name": "a", "finalizers": ["antiphon.dev/two"]}
    both = api.apply(CONFIG_MAPS, "default", "a", body, manager="second")
    assert both["metadata"]["finalizers"] == ["antiphon.dev/one", "antiphon.dev/two"]
    body["metadata"] = {"name": "a"}
    left = api.apply(CONFIG_MAPS, "default", "a", body, manager="first")
    assert left["metadata"]["finalizers"] == ["antiphon.dev/two"]


def test_a_quota_counts_pods_as_they_come_and_end() -> None:
    api = Api()
    hard = {"pods": "2", "requests.cpu": "1500m"}
    api.create(RESOURCE_QUOTAS, "default", {"metadata": {"name": "q"}, "spec": {"hard": hard}})
    with pytest.raises(ApiError, match=r"failed quota: q: must specify requests\.cpu for: main") as refused:
        api.create(PODS, "default", pod("a"))
    assert refused.value.status == 403
    cpu = {"resources": {"requests": {"cpu": "1"}}}
    api.create(PODS, "default", pod("a", **cpu))
    over = "exceeded quota: q, requested: requests.cpu=1, used: requests.cpu=1, limited: requests.cpu=1500m"
    with pytest.raises(ApiError, match=over):
        api.create(PODS, "default", pod("b", **cpu))
    assert api.get(RESOURCE_QUOTAS, "default", "q")["status"]["used"] == {"pods": "1", "requests.cpu": "1"}
    api.merge_patch(PODS, "default", "a", {"status": {"phase": "Succeeded"}}, subresource="status")
    assert api.get(RESOURCE_QUOTAS, "default", "q")["status"]["used"] == {"pods": "0", "requests.cpu": "0"}
    api.create(PODS, "default", pod("b", **cpu))


def test_every_namespace_has_its_service_account() -> None:
    api = Api()
    api.create(NAMESPACES, None, {"metadata": {"name": "chat"}})
    assert api.get(SERVICE_ACCOUNTS, "chat", "default")
    assert api.create(PODS, "chat", pod("p"))["spec"]["tolerations"][0]["tolerationSeconds"] == 300


@pytest.mark.parametrize("name", ["models", "pools"])
def test_the_products_own_kinds_are_accepted_and_all_their_rules_can_be_judged(name: str) -> None:
    api = Api()
    crd = product_crd(name)
    api.create(CRDS, None, crd)
    if name == "models":
        model = {"metadata": {"name": "demo"}, "spec": {"source": {"uri": "demo"}}}
        made = api.create(MODELS, "default", model)
        assert made["spec"]["decode"]["replicas"] == 1
        with pytest.raises(ApiError, match=r"spec\.source\.uri"):
            api.create(MODELS, "default", {"metadata": {"name": "bad"}, "spec": {"source": {"uri": "ftp://x"}}})
    rules = cel.rules_of(custom_schema(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))
    assert rules
    assert [rule for rule in rules if rule in cel.unevaluated] == []


@pytest.fixture
async def server() -> AsyncIterator[KubeServer]:
    async with KubeServer() as running:
        yield running
    assert running.failures == []


async def test_requests_are_counted_and_mutating_ones_named(server: KubeServer, tmp_path: Path) -> None:
    async with Wire(server.write_kubeconfig(tmp_path / "config", user="operator")) as wire:
        before = server.requests.total
        await wire.ask("POST", MAPS, {"metadata": {"name": "a"}}, headers={"User-Agent": "test/1"})
        await wire.ask("GET", MAPS)
        await wire.ask("POST", "/apis/coordination.k8s.io/v1/namespaces/default/leases", {"metadata": {"name": "l"}})
        await wire.ask("PATCH", f"{MAPS}/none", {}, kind="merge")
    written = server.requests.mutating(before)
    assert [(each.verb, each.resource, each.name, each.code) for each in written] == [
        ("create", "configmaps", "", 201),
        ("patch", "configmaps", "none", 404),
    ]
    assert (written[0].user, written[0].user_agent, written[0].manager) == ("operator", "test/1", "test")
    assert len(server.requests.since(before)) == 4
    assert server.requests.by_verb_and_resource[("create", LEASES.plural)] == 1


async def test_a_wrong_token_is_refused(server: KubeServer, tmp_path: Path) -> None:
    kubeconfig = server.write_kubeconfig(tmp_path / "config")
    kubeconfig.write_text(kubeconfig.read_text().replace("token-of-test-admin", "stolen"))
    async with Wire(kubeconfig) as wire:
        answer = await wire.ask("GET", MAPS)
    assert (answer.code, answer.body["reason"]) == (401, "Unauthorized")


async def test_logs_are_what_the_hook_says(server: KubeServer, tmp_path: Path) -> None:
    server.api.create(PODS, "default", pod("p"))
    log = "/api/v1/namespaces/default/pods/p/log"
    async with Wire(server.write_kubeconfig(tmp_path / "config")) as wire:
        waiting = await wire.ask("GET", log)
        assert (waiting.code, waiting.body["reason"]) == (400, "BadRequest")
        assert "is waiting to start" in waiting.body["message"]
        server.api.pod_log = lambda value, container, previous: (
            None if previous else f"{value['metadata']['name']}/{container}\none\ntwo\n"
        )
        assert (await wire.ask("GET", log)).body == "p/main\none\ntwo\n"
        assert (await wire.ask("GET", f"{log}?container=main&tailLines=1")).body == "two\n"
        assert (await wire.ask("GET", f"{log}?previous=true")).code == 400
        assert (await wire.ask("GET", f"{log}?container=other")).code == 400


def test_three_hundred_owners_and_their_children_come_and_go() -> None:
    api = Api()
    secret = {"data": {"k": "dg=="}}
    for number in range(300):
        owner = api.create(CONFIG_MAPS, "default", {"metadata": {"name": f"m-{number}"}})
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": f"m-{number}", "uid": owner["metadata"]["uid"]}
        for child in range(10):
            metadata = {"name": f"m-{number}-{child}", "ownerReferences": [reference], "labels": {"m": str(number)}}
            api.create(SECRETS, "default", {"metadata": metadata, **secret})
    assert len(api.list(SECRETS, "default", labels="m=7")) == 10
    for number in range(300):
        api.delete(CONFIG_MAPS, "default", f"m-{number}")
    assert api.list(SECRETS, "default") == []


def managed(value: dict[str, Any]) -> list[dict[str, Any]]:
    return value["metadata"]["managedFields"]  # type: ignore[no-any-return]


def variables(value: dict[str, Any]) -> list[str]:
    return [each["name"] for each in value["spec"]["template"]["spec"]["containers"][0].get("env", ())]


def product_crd(name: str) -> dict[str, Any]:
    text = (CRD_FOLDER / f"{name}.yaml").read_text()
    lines = [line for line in text.splitlines() if "{{" not in line]
    return yaml.safe_load("\n".join(lines))  # type: ignore[no-any-return]
