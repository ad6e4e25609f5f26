"""What the caches know, whose look counts, and which Models a change concerns."""

from __future__ import annotations

from datetime import UTC, datetime

from antiphon_operator.runtime.caches import Caches
from antiphon_operator.runtime.objects import name_of

from tests.support.kube_objects import changed, model, node, owned, pod_of, thing

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_the_newest_look_wins_whichever_way_it_came() -> None:
    caches, qwen = Caches(), model()
    caches.put("Model", qwen)
    old = owned(qwen, "StatefulSet", "a", spec={"replicas": 1})
    new = changed(old, spec={"replicas": 2})
    assert caches.put("StatefulSet", new) == {"chat/qwen"}
    assert caches.put("StatefulSet", old) == frozenset(), "an old look is no news"
    assert caches.put("StatefulSet", new) == frozenset(), "nor is one that is known"
    (child,) = caches.children(qwen)
    assert child["spec"] == {"replicas": 2}


def test_what_was_deleted_does_not_come_back_by_a_late_look_but_does_when_it_is_made_anew() -> None:
    caches, qwen = Caches(), model()
    caches.put("Model", qwen)
    live = owned(qwen, "Service", "s")
    late = changed(live)
    caches.put("Service", live)
    assert caches.remove("Service", changed(live)) == {"chat/qwen"}
    assert caches.put("Service", late) == frozenset()
    assert caches.children(qwen) == ()
    caches.put("Service", owned(qwen, "Service", "s", metadata={"uid": "another"}))
    assert len(caches.children(qwen)) == 1


def test_an_object_that_left_the_watch_by_its_label_is_back_with_its_next_version() -> None:
    caches, qwen = Caches(), model()
    caches.put("Model", qwen)
    live = owned(qwen, "Service", "s")
    caches.put("Service", live)
    caches.remove("Service", changed(live))
    assert caches.put("Service", changed(live)) == {"chat/qwen"}


def test_what_we_deleted_counts_as_going_until_it_is_gone() -> None:
    caches, qwen = Caches(), model()
    caches.put("Model", qwen)
    live = owned(qwen, "StatefulSet", "a")
    caches.put("StatefulSet", live)
    caches.mark_deleting("StatefulSet", live["metadata"]["uid"], NOW)
    caches.put("StatefulSet", changed(live, status={"replicas": 0}))
    (child,) = caches.children(qwen)
    assert child["metadata"]["deletionTimestamp"] == "2026-01-01T00:00:00Z"
    caches.remove("StatefulSet", changed(live))
    assert caches.children(qwen) == ()


def test_a_status_that_changed_concerns_nobody_and_a_wish_does() -> None:
    caches, qwen = Caches(), model()
    assert caches.put("Model", qwen) == {"chat/qwen"}
    with_status = changed(qwen, status={"phase": "Ready"})
    assert caches.put("Model", with_status) == frozenset()
    assert caches.model("chat/qwen")["status"] == {"phase": "Ready"}, "but it is known"  # type: ignore[index]
    assert caches.put("Model", changed(with_status, metadata={"generation": 2})) == {"chat/qwen"}
    annotated = changed(with_status, metadata={"generation": 2, "annotations": {"antiphon.dev/update": "1"}})
    assert caches.put("Model", annotated) == {"chat/qwen"}


def test_the_oldest_claims_a_name_and_rivals_hear_when_it_goes() -> None:
    caches = Caches()
    spec = {"source": {"uri": "demo"}, "names": ["shared"]}
    old = model("old", spec=spec)
    young = model("young", spec=spec, metadata={"creationTimestamp": "2026-02-01T00:00:00Z"})
    caches.put("Model", young)
    assert caches.name_owners(young) == {"shared": "chat/young"}
    assert caches.put("Model", old) == {"chat/old", "chat/young"}
    assert caches.name_owners(young) == {"shared": "chat/old"}
    going = changed(old, metadata={"deletionTimestamp": "2026-03-01T00:00:00Z"})
    assert caches.put("Model", going) == {"chat/old", "chat/young"}
    assert caches.name_owners(young) == {"shared": "chat/young"}
    assert caches.model("chat/old") is None, "a Model that is going is gone"


def test_nodes_matter_when_they_are_lost_and_to_those_with_pods_there() -> None:
    caches, qwen, other = Caches(), model(), model("other")
    for one in (qwen, other):
        caches.put("Model", one)
    caches.put("Node", node("node-1"))
    caches.put("Node", node("node-2"))
    caches.put("Pod", pod_of(qwen, "qwen-0", "node-1"))
    caches.put("Pod", pod_of(other, "other-0", "node-2"))
    assert caches.put("Node", node("node-1")) == frozenset(), "a heartbeat"
    assert caches.put("Node", node("node-1", ready="Unknown")) == {"chat/qwen"}
    assert caches.lost_nodes(caches.pods(qwen)) == {"node-1"}
    assert caches.remove("Node", node("node-2")) == {"chat/other"}
    assert caches.lost_nodes(caches.pods(other)) == {"node-2"}
    assert Caches(nodes_known=False).lost_nodes(caches.pods(qwen)) == frozenset()


def test_claims_and_namespaces_concern_the_models_that_they_are_about() -> None:
    caches = Caches()
    by_source = model("a", spec={"source": {"uri": "pvc://weights/qwen"}})
    by_cache = model("b", spec={"source": {"uri": "hf://q/w", "cache": {"type": "Claim", "claimName": "weights"}}})
    elsewhere = model("c", namespace="lab", spec={"source": {"uri": "pvc://weights"}})
    for one in (by_source, by_cache, elsewhere, model("d")):
        caches.put("Model", one)
    claim = thing("PersistentVolumeClaim", "weights")
    assert caches.put("PersistentVolumeClaim", claim) == {"chat/a", "chat/b"}
    assert set(caches.claims(by_source)) == {"weights"}
    assert caches.claims(elsewhere) == {}
    lab = thing("Namespace", "lab", namespace="", metadata={"labels": {"level": "restricted"}})
    assert caches.put("Namespace", lab) == {"lab/c"}
    assert caches.put("Namespace", changed(lab)) == frozenset()
    assert caches.namespace_labels("lab") == {"level": "restricted"}


def test_a_pods_spec_and_field_managers_are_not_kept_but_a_pools_are() -> None:
    caches, qwen = Caches(), model(metadata={"managedFields": [{"manager": "kubectl"}]})
    caches.put("Model", qwen)
    caches.put("Pod", pod_of(qwen, "qwen-0", status={"phase": "Running"}))
    (pod,) = caches.pods(qwen)
    assert pod["spec"] == {"nodeName": "node-1", "containers": [{"name": "worker"}]}
    assert pod["status"] == {"phase": "Running"}
    assert "managedFields" not in caches.model("chat/qwen")["metadata"]  # type: ignore[index]
    caches.put("Pool", owned(qwen, "Pool", "qwen-decode", metadata={"managedFields": [{"manager": "kubectl"}]}))
    pool = caches.child(qwen, "Pool", "qwen-decode")
    assert pool is not None
    assert pool["metadata"]["managedFields"]


def test_a_pod_is_found_by_its_models_label_also_when_its_owner_is_gone() -> None:
    caches, qwen = Caches(), model()
    caches.put("Model", qwen)
    assert caches.put("Pod", pod_of(qwen, "qwen-0")) == {"chat/qwen"}
    assert [name_of(pod) for pod in caches.pods(qwen)] == ["qwen-0"]
    assert caches.remove("Pod", pod_of(qwen, "qwen-0")) == {"chat/qwen"}
    assert caches.pods(qwen) == ()


def test_a_scaler_that_takes_a_pool_over_without_changing_its_number_is_news() -> None:
    caches, qwen = Caches(), model()
    caches.put("Model", qwen)
    pool = owned(qwen, "Pool", "qwen-decode", metadata={"generation": 1, "managedFields": [_owns("antiphon-operator")]})
    caches.put("Pool", pool)
    taken = changed(pool)
    taken["metadata"]["managedFields"] = [_owns("antiphon-operator"), _owns("keda")]
    assert caches.put("Pool", taken) == {"chat/qwen"}
    assert caches.put("Pool", changed(taken, status={"replicas": 1})) == frozenset()


def _owns(manager: str) -> dict[str, object]:
    return {"manager": manager, "fieldsV1": {"f:spec": {"f:replicas": {}}}}
