"""Small Kubernetes objects, as an API server would give them. For tests of the operator's runtime."""

from __future__ import annotations

import itertools
from typing import Any

from antiphon_operator.names import API_VERSION, MANAGED_BY, MANAGED_BY_LABEL, MODEL_LABEL

_versions = itertools.count(1000)

API_VERSIONS = {
    "Model": API_VERSION,
    "Pool": API_VERSION,
    "StatefulSet": "apps/v1",
    "Service": "v1",
    "Pod": "v1",
    "Node": "v1",
    "Namespace": "v1",
    "PersistentVolumeClaim": "v1",
}


def thing(kind: str, name: str, *, namespace: str = "chat", uid: str = "", **fields: Any) -> dict[str, Any]:
    """Each call gives a newer resourceVersion. `metadata` in `fields` is merged over what is made here."""
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": uid or f"uid-{kind}-{namespace}-{name}",
        "resourceVersion": str(next(_versions)),
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
        **fields.pop("metadata", {}),
    }
    return {"apiVersion": API_VERSIONS[kind], "kind": kind, "metadata": metadata, **fields}


def model(name: str = "qwen", *, namespace: str = "chat", **fields: Any) -> dict[str, Any]:
    fields.setdefault("spec", {"source": {"uri": "demo"}})
    return thing("Model", name, namespace=namespace, **fields)


def owned(owner: dict[str, Any], kind: str, name: str, **fields: Any) -> dict[str, Any]:
    """A child of a Model."""
    reference = {
        "apiVersion": API_VERSION,
        "kind": "Model",
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }
    metadata = {
        "ownerReferences": [reference],
        "labels": {MANAGED_BY_LABEL: MANAGED_BY, MODEL_LABEL: owner["metadata"]["name"]},
        **fields.pop("metadata", {}),
    }
    return thing(kind, name, namespace=owner["metadata"]["namespace"], metadata=metadata, **fields)


def pod_of(owner: dict[str, Any], name: str, node: str = "node-1", **fields: Any) -> dict[str, Any]:
    labels = {MANAGED_BY_LABEL: MANAGED_BY, MODEL_LABEL: owner["metadata"]["name"]}
    return thing(
        "Pod",
        name,
        namespace=owner["metadata"]["namespace"],
        metadata={"labels": labels},
        spec={"nodeName": node, "containers": [{"name": "worker", "image": "x", "env": [{"name": "A"}]}]},
        **fields,
    )


def node(name: str, ready: str = "True", **fields: Any) -> dict[str, Any]:
    status = {"conditions": [{"type": "Ready", "status": ready}, {"type": "MemoryPressure", "status": "False"}]}
    return thing("Node", name, namespace="", status=status, **fields)


def changed(before: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The same object, later."""
    metadata = {**before["metadata"], "resourceVersion": str(next(_versions)), **fields.pop("metadata", {})}
    return {**before, **fields, "metadata": metadata}
