"""What the runtime reads off Kubernetes objects, and how little of them it keeps.

Objects stay parsed JSON, as the API server gave them. `slim` drops what nobody here reads (field managers, most of a
pod's spec), as the caches hold thousands of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from antiphon_operator.names import API_VERSION, MODEL_LABEL, model_key
from antiphon_operator.plan.observed import Object

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def metadata(thing: Object) -> Mapping[str, Any]:
    found: Mapping[str, Any] = thing.get("metadata") or {}
    return found


def uid_of(thing: Object) -> str:
    return str(metadata(thing).get("uid", ""))


def name_of(thing: Object) -> str:
    return str(metadata(thing).get("name", ""))


def namespace_of(thing: Object) -> str:
    return str(metadata(thing).get("namespace", ""))


def key_of(model: Object) -> str:
    """`namespace/name`, the key of a Model in the queue, the caches and Redis."""
    return model_key(namespace_of(model), name_of(model))


def split_key(key: str) -> tuple[str, str]:
    """(namespace, name)"""
    namespace, _, name = key.partition("/")
    return namespace, name


def version_of(thing: Object) -> int | None:
    """`resourceVersion` as a number; None where the server gives none that can be compared."""
    version = str(metadata(thing).get("resourceVersion", ""))
    return int(version) if version.isdecimal() else None


def is_deleting(thing: Object) -> bool:
    return bool(metadata(thing).get("deletionTimestamp"))


def owner_model_uid(thing: Object) -> str | None:
    """Uid of the Model that controls it."""
    for owner in metadata(thing).get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == "Model" and owner.get("apiVersion") == API_VERSION:
            return str(owner.get("uid"))
    return None


def model_key_of_pod(pod: Object) -> str | None:
    """A pod belongs to a StatefulSet or a Job, so its Model is known by its label."""
    model = (metadata(pod).get("labels") or {}).get(MODEL_LABEL)
    return model_key(namespace_of(pod), model) if model else None


def node_of_pod(pod: Object) -> str:
    return str((pod.get("spec") or {}).get("nodeName") or "")


def client_names(model: Object) -> tuple[str, ...]:
    """Names that clients use, as the Model asks for them."""
    names = (model.get("spec") or {}).get("names")
    return tuple(str(name) for name in names) if isinstance(names, list) and names else (name_of(model),)


def claim_names(model: Object) -> frozenset[str]:
    """PersistentVolumeClaims that the Model names: as its source, or as its cache."""
    source = (model.get("spec") or {}).get("source") or {}
    uri = str(source.get("uri") or "")
    names = {str((source.get("cache") or {}).get("claimName") or "")}
    if uri.startswith("pvc://"):
        names.add(uri.removeprefix("pvc://").split("/", 1)[0])
    return frozenset(names - {""})


def node_is_lost(node: Object) -> bool:
    """Not Ready: its kubelet is silent (Unknown) or says that it cannot run pods (False)."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(condition.get("type") == "Ready" and condition.get("status") != "True" for condition in conditions)


def replicas_owners(thing: Object) -> frozenset[str]:
    """Field managers that own `spec.replicas`. Nobody, for an object whose field managers are not kept."""
    return frozenset(
        str(entry.get("manager"))
        for entry in metadata(thing).get("managedFields") or ()
        if "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    )


def slim(kind: str, thing: Object) -> Object:
    """A copy without what nobody reads. Of a Pool, field managers stay: they tell who owns its size."""
    kept = dict(thing)
    about = dict(metadata(thing))
    if kind != "Pool":
        about.pop("managedFields", None)
    if LAST_APPLIED in (about.get("annotations") or {}):
        about["annotations"] = {key: value for key, value in about["annotations"].items() if key != LAST_APPLIED}
    kept["metadata"] = about
    if kind == "Pod":
        spec = thing.get("spec") or {}
        kept["spec"] = {
            "nodeName": spec.get("nodeName", ""),
            "containers": [{"name": container.get("name", "")} for container in spec.get("containers") or ()],
        }
    if kind == "Node":
        conditions = [c for c in (thing.get("status") or {}).get("conditions") or () if c.get("type") == "Ready"]
        kept = {"metadata": {"name": about.get("name"), "uid": about.get("uid")}, "status": {"conditions": conditions}}
        kept["metadata"]["resourceVersion"] = about.get("resourceVersion")
    if kind == "Namespace":
        kept.pop("spec", None)
    return kept
