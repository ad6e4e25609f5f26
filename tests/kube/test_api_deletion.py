"""How things end in the double: pods with grace, namespaces with all that is in them, kinds with their objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.kube.api import Api, ApiError
from tests.support.kube.resources import (
    CONFIG_MAPS,
    CRDS,
    NAMESPACES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    SECRETS,
    STATEFULSETS,
    Resource,
)
from tests.support.kube.subresources import bind, evict

WIDGETS = Resource("conformance.antiphon.dev", "v1", "widgets", "Widget", True)
WIDGETS_CRD = yaml.safe_load((Path(__file__).parent / "fixtures" / "widgets.yaml").read_text())


@pytest.fixture
def api() -> Api:
    return Api()


def pod(api: Api, name: str = "p", namespace: str = "default", node: str = "n", **metadata: Any) -> dict[str, Any]:
    containers = [{"name": "main", "image": "x"}]
    body = {"metadata": {"name": name, **metadata}, "spec": {"nodeName": node, "containers": containers}}
    return api.create(PODS, namespace, body)


def exists(api: Api, resource: Resource, name: str, namespace: str = "default") -> bool:
    return bool(api.list(resource, namespace, fields=f"metadata.name={name}"))


def test_a_pod_on_a_node_stays_until_its_kubelet_has_ended_it(api: Api) -> None:
    pod(api)
    marked = api.delete(PODS, "default", "p")
    assert marked["metadata"]["deletionGracePeriodSeconds"] == 30
    assert api.delete(PODS, "default", "p") == marked
    shorter = api.delete(PODS, "default", "p", grace_s=5)
    assert shorter["metadata"]["deletionGracePeriodSeconds"] == 5
    api.delete(PODS, "default", "p", grace_s=0)
    assert not exists(api, PODS, "p")


def test_a_pod_without_a_node_or_that_has_ended_goes_at_once(api: Api) -> None:
    pod(api, "waiting", node="")
    pod(api, "ended")
    api.merge_patch(PODS, "default", "ended", {"status": {"phase": "Failed"}}, subresource="status")
    for name in ("waiting", "ended"):
        api.delete(PODS, "default", name)
        assert not exists(api, PODS, name)


def test_a_pod_with_a_finalizer_outlives_its_grace(api: Api) -> None:
    pod(api, finalizers=["antiphon.dev/hold"])
    api.delete(PODS, "default", "p", grace_s=0)
    assert exists(api, PODS, "p")
    api.merge_patch(PODS, "default", "p", {"metadata": {"finalizers": None}})
    assert not exists(api, PODS, "p")


def test_a_scheduled_pod_cannot_be_bound_again(api: Api) -> None:
    pod(api, node="")
    bind(api, "default", "p", {"target": {"name": "n1"}})
    assert api.get(PODS, "default", "p")["spec"]["nodeName"] == "n1"
    with pytest.raises(ApiError, match="already assigned"):
        bind(api, "default", "p", {"target": {"name": "n2"}})


def test_the_end_of_a_deletion_is_one_event(api: Api) -> None:
    api.create(CONFIG_MAPS, "default", {"metadata": {"name": "a", "finalizers": ["antiphon.dev/hold"]}})
    heard: list[str] = []
    api.subscribe(lambda kind, resource, value: heard.append(kind))
    api.delete(CONFIG_MAPS, "default", "a")
    api.merge_patch(CONFIG_MAPS, "default", "a", {"metadata": {"finalizers": None}})
    assert heard == ["MODIFIED", "DELETED"]


def test_a_namespace_takes_everything_with_it_and_waits_for_its_pods(api: Api) -> None:
    api.create(NAMESPACES, None, {"metadata": {"name": "chat"}})
    api.create(CONFIG_MAPS, "chat", {"metadata": {"name": "a"}})
    pod(api, namespace="chat")
    api.delete(NAMESPACES, None, "chat")
    assert api.get(NAMESPACES, None, "chat")["status"]["phase"] == "Terminating"
    assert not exists(api, CONFIG_MAPS, "a", "chat")
    assert api.get(PODS, "chat", "p")["metadata"]["deletionTimestamp"]
    with pytest.raises(ApiError, match="because it is being terminated") as refused:
        api.create(SECRETS, "chat", {"metadata": {"name": "s"}})
    assert refused.value.status == 403
    api.delete(PODS, "chat", "p", grace_s=0)
    assert not any(each["metadata"]["name"] == "chat" for each in api.list(NAMESPACES))


def test_children_of_children_go_too_and_pods_gracefully(api: Api) -> None:
    owner = api.create(CONFIG_MAPS, "default", {"metadata": {"name": "model"}})
    containers = [{"name": "main", "image": "x"}]
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": containers}}
    spec = {"serviceName": "s", "selector": {"matchLabels": {"a": "b"}}, "template": template}
    replica = api.create(STATEFULSETS, "default", {"metadata": {"name": "s", **owned_by(owner)}, "spec": spec})
    pod(api, **owned_by(replica))
    api.delete(CONFIG_MAPS, "default", "model")
    assert not exists(api, STATEFULSETS, "s")
    assert api.get(PODS, "default", "p")["metadata"]["deletionTimestamp"]


def test_a_child_of_two_owners_stays_while_one_lives(api: Api) -> None:
    first, second = (api.create(CONFIG_MAPS, "default", {"metadata": {"name": name}}) for name in ("one", "two"))
    references = owned_by(first)["ownerReferences"] + owned_by(second)["ownerReferences"]
    api.create(SECRETS, "default", {"metadata": {"name": "child", "ownerReferences": references}})
    api.delete(CONFIG_MAPS, "default", "one")
    left = api.get(SECRETS, "default", "child")["metadata"]["ownerReferences"]
    assert [each["name"] for each in left] == ["two"]
    api.delete(CONFIG_MAPS, "default", "two")
    assert not exists(api, SECRETS, "child")


def test_an_owner_made_anew_under_the_same_name_is_another(api: Api) -> None:
    owner = api.create(CONFIG_MAPS, "default", {"metadata": {"name": "model"}})
    api.delete(CONFIG_MAPS, "default", "model")
    api.create(CONFIG_MAPS, "default", {"metadata": {"name": "model"}})
    api.create(SECRETS, "default", {"metadata": {"name": "child", **owned_by(owner)}})
    assert not exists(api, SECRETS, "child")


def test_an_owner_in_another_namespace_does_not_count(api: Api) -> None:
    owner = api.create(CONFIG_MAPS, "kube-system", {"metadata": {"name": "model"}})
    api.create(SECRETS, "default", {"metadata": {"name": "child", **owned_by(owner)}})
    assert not exists(api, SECRETS, "child")


def test_a_kind_takes_its_objects_with_it(api: Api) -> None:
    api.create(CRDS, None, WIDGETS_CRD)
    body = {"metadata": {"name": "w", "finalizers": ["antiphon.dev/hold"]}, "spec": {"size": "small"}}
    api.create(WIDGETS, "default", body)
    api.delete(CRDS, None, "widgets.conformance.antiphon.dev")
    assert api.get(WIDGETS, "default", "w")["metadata"]["deletionTimestamp"]
    api.merge_patch(WIDGETS, "default", "w", {"metadata": {"finalizers": None}})
    assert api.list(CRDS) == []
    with pytest.raises(ApiError, match="could not find the requested resource"):
        api.list(WIDGETS)


def test_an_eviction_asks_the_budget(api: Api) -> None:
    pod(api, labels={"app": "x"})
    ready = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
    api.merge_patch(PODS, "default", "p", ready, subresource="status")
    budget = {"metadata": {"name": "b"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}}}
    api.create(POD_DISRUPTION_BUDGETS, "default", budget)
    with pytest.raises(ApiError, match="Cannot evict pod as it would violate") as refused:
        evict(api, "default", "p", {})
    assert refused.value.status == 429
    status = {"observedGeneration": 1, "currentHealthy": 2, "desiredHealthy": 1, "disruptionsAllowed": 1}
    api.merge_patch(POD_DISRUPTION_BUDGETS, "default", "b", {"status": status}, subresource="status")
    evict(api, "default", "p", {})
    assert api.get(PODS, "default", "p")["metadata"]["deletionTimestamp"]
    assert api.get(POD_DISRUPTION_BUDGETS, "default", "b")["status"]["disruptionsAllowed"] == 0


def owned_by(owner: dict[str, Any]) -> dict[str, Any]:
    metadata = owner["metadata"]
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
    return {"ownerReferences": [reference | {"name": metadata["name"], "uid": metadata["uid"]}]}
