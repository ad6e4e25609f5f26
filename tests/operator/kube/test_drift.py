"""What counts as drift: whatever a server adds does not, whatever a hand changes does."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
from antiphon_operator.kube import drift
from antiphon_operator.names import APPLIED_ANNOTATION, DRAINING_SINCE_ANNOTATION
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

settings.register_profile("drift", max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PROFILE = settings.get_profile("drift")
NAMES = st.text("abcdefghij", min_size=1, max_size=6)


@dataclass(frozen=True)
class Wanted:
    manifest: dict[str, Any]
    create_only: bool = False


def unique(elements: st.SearchStrategy[dict[str, Any]], *keys: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(elements, max_size=3, unique_by=lambda element: tuple(element[key] for key in keys))


QUANTITIES = st.sampled_from(["1Gi", "1024Mi", "1000m", "1", "500m", "64Gi", 2])
CONTAINERS = st.fixed_dictionaries(
    {"name": NAMES, "image": NAMES},
    optional={
        "args": st.lists(NAMES, max_size=3),
        "env": unique(st.fixed_dictionaries({"name": NAMES, "value": st.text("ab", max_size=2)}), "name"),
        "ports": unique(
            st.fixed_dictionaries(
                {"containerPort": st.integers(1, 5), "protocol": st.sampled_from(["TCP", "UDP"])},
                optional={"name": NAMES},
            ),
            "containerPort",
            "protocol",
        ),
        "volumeMounts": unique(
            st.fixed_dictionaries({"name": NAMES, "mountPath": NAMES}, optional={"readOnly": st.booleans()}),
            "mountPath",
        ),
        "resources": st.fixed_dictionaries(
            {}, optional={"limits": st.dictionaries(st.sampled_from(["cpu", "memory"]), QUANTITIES)}
        ),
        "securityContext": st.fixed_dictionaries({"allowPrivilegeEscalation": st.booleans()}),
    },
)
MANIFESTS = st.fixed_dictionaries(
    {
        "apiVersion": st.just("apps/v1"),
        "kind": st.just("StatefulSet"),
        "metadata": st.fixed_dictionaries(
            {"name": NAMES, "namespace": NAMES},
            optional={"labels": st.dictionaries(NAMES, NAMES, max_size=2), "annotations": st.just({})},
        ),
        "spec": st.fixed_dictionaries(
            {"replicas": st.integers(0, 3), "template": st.fixed_dictionaries({"spec": st.fixed_dictionaries({
                "containers": unique(CONTAINERS, "name"),
                "volumes": unique(
                    st.fixed_dictionaries({"name": NAMES, "emptyDir": st.sampled_from([{}, {"sizeLimit": "1024Mi"}])}),
                    "name",
                ),
                "tolerations": st.lists(st.fixed_dictionaries({"key": NAMES}), max_size=2),
            })})},
            optional={"selector": st.fixed_dictionaries({"matchLabels": st.dictionaries(NAMES, NAMES, max_size=1)})},
        ),
    }
)  # fmt: skip

CANONICAL = {"1024Mi": "1Gi", "1000m": "1", 2: "2"}
IDENTITIES = (("mountPath",), ("containerPort", "protocol"), ("name",))
LIST_MAPS = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}
LEFT_OUT_WHEN_EMPTY = {"annotations", "labels", "matchLabels", "limits", "args", "env", "ports", "volumeMounts"} | {
    "containers", "volumes", "tolerations"
}  # fmt: skip


def stored(value: Any, key: str, chance: random.Random, in_quantities: bool = False) -> Any:
    """As a server keeps and shows what was applied: defaults added, lists merged, amounts in one form."""
    if isinstance(value, dict):
        kept = {
            name: stored(inner, name, chance, key == "limits")
            for name, inner in value.items()
            if not (inner in ({}, []) and name in LEFT_OUT_WHEN_EMPTY)
            and not (name in ("value", "readOnly") and not inner)
        }
        kept["addedByTheServer" if key != "limits" else "example.com/added"] = "1"
        return dict(sorted(kept.items(), key=lambda _: chance.random()))
    if isinstance(value, list):
        elements = [stored(element, key, chance) for element in value]
        if key in LIST_MAPS:
            elements.append({LIST_MAPS[key]: "of another manager", "image": "x"})
            chance.shuffle(elements)
        return elements
    if in_quantities or key == "sizeLimit":
        return CANONICAL.get(value, value)
    return value


def live_of(manifest: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    live = stored(drift.stamped(manifest), "", chance)
    live["metadata"] |= {"uid": "u", "resourceVersion": "9", "managedFields": [{"manager": "someone"}]}
    live["status"] = {"replicas": 1}
    assert isinstance(live, dict)
    return live


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Paths of all that is neither a map nor a list, and of empty maps."""
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(value, list):
        return [leaf for number, inner in enumerate(value) for leaf in leaves(inner, (*path, number))]
    return [path]


def holder(live: dict[str, Any], manifest: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    """The map in `live` that holds what `path` names in the manifest, found by the keys of list maps."""
    there: Any = live
    wanted: Any = manifest
    for step in path[:-1]:
        wanted = wanted[step]
        if isinstance(step, int) and isinstance(wanted, dict) and "key" not in wanted:
            identity = next(keys for keys in IDENTITIES if keys[0] in wanted)
            there = next(element for element in there if all(element.get(key) == wanted[key] for key in identity))
        else:
            there = there[step]
    return there  # type: ignore[no-any-return]


@settings(PROFILE)
@given(MANIFESTS, st.randoms())
def test_what_the_server_and_other_managers_add_is_no_drift(manifest: dict[str, Any], chance: random.Random) -> None:
    live = live_of(manifest, chance)
    assert list(drift._owned(drift.stamped(manifest), live)) == []
    assert not drift.needs_apply(Wanted(manifest), live)
    assert drift.changed_fields(Wanted(manifest), live) == []


@settings(PROFILE)
@given(MANIFESTS, st.randoms(), st.data())
def test_any_owned_value_that_is_changed_or_taken_away_is_drift(
    manifest: dict[str, Any], chance: random.Random, data: st.DataObject
) -> None:
    live = live_of(manifest, chance)
    owned = [path for path in leaves(manifest) if path[0] in ("metadata", "spec") and path[1] != "annotations"]
    path = data.draw(st.sampled_from(owned))
    there = holder(live, manifest, path)
    last = path[-1]
    if isinstance(there, dict) and last not in there:
        return  # A nothing that the server does not keep.
    if isinstance(there, dict) and data.draw(st.booleans(), label="taken away"):
        del there[last]
    else:
        there[last] = "by hand"  # type: ignore[index]
    assert drift.needs_apply(Wanted(manifest), live)
    assert drift.changed_fields(Wanted(manifest), live), "a hand edit is seen as one"


@settings(PROFILE)
@given(MANIFESTS, st.randoms())
def test_a_field_that_is_not_wanted_any_more_is_drift_but_no_hand_edit(
    manifest: dict[str, Any], chance: random.Random
) -> None:
    live = live_of(manifest, chance)
    fewer = copy.deepcopy(manifest)
    del fewer["spec"]["replicas"]
    assert drift.needs_apply(Wanted(fewer), live)
    assert drift.changed_fields(Wanted(fewer), live) == []


@settings(PROFILE)
@given(MANIFESTS, st.randoms())
def test_the_digest_depends_on_what_is_said_and_not_on_how(manifest: dict[str, Any], chance: random.Random) -> None:
    def shuffled(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: shuffled(inner) for key, inner in sorted(value.items(), key=lambda _: chance.random())}

    assert drift.digest(shuffled(manifest)) == drift.digest(manifest) == drift.digest(drift.stamped(manifest))


def service(**spec: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "n"}, "spec": spec}


@pytest.mark.parametrize(
    ("wanted", "live", "same"),
    [
        ({"ports": [{"port": 80}]}, {"ports": [{"port": 80, "protocol": "TCP", "targetPort": 80}]}, 1),
        ({"ports": [{"port": 80}]}, {"ports": [{"port": 81, "protocol": "TCP"}]}, 0),
        ({"ports": [{"port": 80, "targetPort": "9000"}]}, {"ports": [{"port": 80, "targetPort": 9000}]}, 1),
        ({"replicas": 0}, {}, 0),
        ({"replicas": 1}, {"replicas": True}, 0),
        ({"suspend": False}, {}, 0),
        ({"hostNetwork": False}, {}, 1),
        ({"volumes": [{"name": "a", "emptyDir": {}}]}, {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}, 0),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "a"}, {"key": "b"}]}, 0),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "a", "effect": "NoExecute"}]}, 1),
        ({"ingress": [{"ports": [{"port": 9000}]}]}, {"ingress": [{"ports": [{"port": 9000, "protocol": "TCP"}]}]}, 1),
        ({"ingress": [{"ports": [{"port": 9000}]}]}, {"ingress": [{"ports": [{"port": 9000}, {"port": 1}]}]}, 0),
        ({"env": [{"name": "A", "value": "1024Mi"}]}, {"env": [{"name": "A", "value": "1Gi"}]}, 0),
        ({"limits": {"cpu": "1000m"}}, {"limits": {"cpu": "1"}}, 1),
        ({"limits": {"cpu": "1000m"}}, {"limits": {"cpu": "2"}}, 0),
        ({"policyTypes": []}, {}, 1),
        ({"podSelector": {}}, {"podSelector": {}}, 1),
        ({"selector": {"a": "b"}}, {"selector": "a"}, 0),
    ],
)  # fmt: skip
def test_how_the_api_writes_things_down(wanted: dict[str, Any], live: dict[str, Any], same: int) -> None:
    held = drift.stamped(service(**wanted)) | {"spec": live}
    assert drift.needs_apply(Wanted(service(**wanted)), held) is not bool(same)


def test_a_hand_edit_is_named_by_its_path() -> None:
    wanted = Wanted(service(replicas=2, template={"containers": [{"name": "worker", "image": "a"}]}))
    live = copy.deepcopy(drift.stamped(wanted.manifest))
    live["spec"]["replicas"] = 3
    live["spec"]["template"]["containers"][0]["image"] = "b"
    assert drift.changed_fields(wanted, live) == ["spec.replicas", "spec.template.containers[worker].image"]


def test_of_an_object_that_cannot_be_changed_only_metadata_counts_and_what_is_ours_in_it() -> None:
    manifest = service(replicas=2)
    manifest["metadata"] |= {
        "labels": {"app": "a"},
        "annotations": {DRAINING_SINCE_ANNOTATION: "2026-01-01T00:00:00Z"},
        "ownerReferences": [{"uid": "u1", "name": "m"}],
    }
    live = copy.deepcopy(drift.stamped(manifest))
    live["spec"] = {"replicas": 7}
    live["metadata"]["labels"]["of-another"] = "x"
    live["metadata"]["ownerReferences"].append({"uid": "u2", "name": "other"})
    assert not drift.needs_apply(Wanted(manifest, create_only=True), live)

    live["metadata"]["annotations"] = {"antiphon.dev/old": "x", "other.dev/x": "y", APPLIED_ANNOTATION: "d"}
    live["metadata"]["ownerReferences"] = [{"uid": "u2", "name": "other"}]
    assert drift.needs_apply(Wanted(manifest, create_only=True), live)
    assert drift.metadata_patch(manifest, live) == {
        "metadata": {
            "annotations": {DRAINING_SINCE_ANNOTATION: "2026-01-01T00:00:00Z", "antiphon.dev/old": None},
            "ownerReferences": [{"uid": "u1", "name": "m"}, {"uid": "u2", "name": "other"}],
        }
    }


JSON = st.recursive(
    st.booleans() | st.integers(0, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=8,
)
STATUSES = st.dictionaries(st.sampled_from("pqrs"), JSON, max_size=4)


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    kept = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            kept.pop(key, None)
        else:
            kept[key] = merged(kept.get(key), value)
    return kept


@given(STATUSES, STATUSES)
def test_a_status_patch_makes_the_status_exactly_what_is_wanted(wanted: dict[str, Any], live: dict[str, Any]) -> None:
    patch = drift.status_patch(wanted, live)
    after = merged(live, patch or {})
    assert repr(sorted(after.items())) == repr(sorted(wanted.items())) or after == wanted
    assert drift.status_patch(wanted, after) is None
