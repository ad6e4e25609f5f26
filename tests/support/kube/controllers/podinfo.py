"""What controllers ask of a pod, and how they make one from a template. Pure."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]


def controller_of(thing: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The owner reference with `controller: true`."""
    owners = thing["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


def condition(thing: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    conditions = (thing.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == kind), None)


def is_true(thing: Mapping[str, Any], kind: str) -> bool:
    found = condition(thing, kind)
    return found is not None and found["status"] == "True"


def phase(pod: Mapping[str, Any]) -> str:
    return (pod.get("status") or {}).get("phase") or "Pending"


def is_terminating(thing: Mapping[str, Any]) -> bool:
    return thing["metadata"].get("deletionTimestamp") is not None


def is_ready(pod: Mapping[str, Any]) -> bool:
    return phase(pod) == "Running" and is_true(pod, "Ready")


def has_ended(pod: Mapping[str, Any]) -> bool:
    return phase(pod) in ("Succeeded", "Failed")


def template_hash(template: Mapping[str, Any]) -> str:
    """Ten characters over a pod template."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def owner_reference(owner: Mapping[str, Any]) -> Object:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def pod_from(template: Mapping[str, Any], owner: Mapping[str, Any], name: str, labels: Mapping[str, str]) -> Object:
    """A pod of `template`, controlled by `owner`, with `labels` beside the template's."""
    metadata = template.get("metadata") or {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": owner["metadata"]["namespace"],
            "labels": {**(metadata.get("labels") or {}), **labels},
            "annotations": dict(metadata.get("annotations") or {}),
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": copy.deepcopy(dict(template["spec"])),
    }


def with_condition(thing: Mapping[str, Any], new: Mapping[str, Any]) -> list[Object]:
    """The conditions with `new` in place of the one of its type; its transition time stays if the status does."""
    conditions = [dict(each) for each in (thing.get("status") or {}).get("conditions") or ()]
    old = next((each for each in conditions if each["type"] == new["type"]), None)
    if old is None:
        return [*conditions, dict(new)]
    kept = old.get("lastTransitionTime") if old["status"] == new["status"] else None
    merged = {**new, "lastTransitionTime": kept or new.get("lastTransitionTime")}
    return [merged if each["type"] == new["type"] else each for each in conditions]
