"""What every child has: a name, labels to find it by, and an owner reference that collects it when the Model goes.

`blockOwnerDeletion` is false: deleting a Model never waits for its children, nor needs the operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from antiphon_operator import names
from antiphon_operator.names import Role
from antiphon_operator.resource.effective import EffectiveModel

Manifest = dict[str, Any]
"""A Kubernetes object, or a part of one, as JSON."""

WORKER = "worker"
SOURCE = "source"
"""Values of the component label on the pods of replicas and of the Job that gets the weights."""


def labels(model: EffectiveModel, component: str = "", role: Role | None = None, revision: str = "") -> dict[str, str]:
    """Labels of a child; those of a part it does not belong to are left out."""
    found = {
        names.NAME_LABEL: names.APP,
        names.MANAGED_BY_LABEL: names.MANAGED_BY,
        names.MODEL_LABEL: model.name,
    }
    if component:
        found[names.COMPONENT_LABEL] = component
    if role:
        found[names.ROLE_LABEL] = role
    if revision:
        found[names.REVISION_LABEL] = revision
    return found


def owner_reference(model: EffectiveModel) -> Manifest:
    """To the Model, as its one controller."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": "Model",
        "name": model.name,
        "uid": model.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def metadata(
    model: EffectiveModel, name: str, own_labels: Mapping[str, str], annotations: Mapping[str, str] | None = None
) -> Manifest:
    """Metadata of a child called `name`."""
    found: Manifest = {
        "name": name,
        "namespace": model.namespace,
        "labels": dict(own_labels),
        "ownerReferences": [owner_reference(model)],
    }
    if annotations:
        found["annotations"] = dict(annotations)
    return found


def worker_selector(model: EffectiveModel, role: Role | None = None) -> dict[str, str]:
    """Labels that the pods of the Model's replicas have, and its Job's pods have not."""
    found = {names.MODEL_LABEL: model.name, names.COMPONENT_LABEL: WORKER}
    if role:
        found[names.ROLE_LABEL] = role
    return found
