"""A revision: the name of what pods are made of, and the ControllerRevision that keeps it as it was rendered.

The name is a hash of what a person can change (the pod-affecting part of the spec, the resolved commit, the update
annotation) and of nothing that an operator brings (its version, its default image, how it renders). So a newer
operator finds the same revisions, makes their replicas from the templates that are kept, and changes no pod; that it
would render something else shows in `templates_digest`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from antiphon_operator import names
from antiphon_operator.names import ROLES, Role
from antiphon_operator.options import OperatorContext
from antiphon_operator.render.metadata import Manifest, labels, metadata
from antiphon_operator.render.templates import image_of, pod_template
from antiphon_operator.render.weights import Weights
from antiphon_operator.resource.changes import pod_affecting
from antiphon_operator.resource.effective import EffectiveModel

DATA_FORMAT = 1


class RevisionDataError(ValueError):
    """A ControllerRevision whose data is not what this version keeps in one."""


@dataclass(frozen=True, slots=True)
class RevisionPool:
    """One pool as the revision has it."""

    pods: int
    """Pods of one replica."""
    devices: int
    """Accelerators of one replica."""
    template: Mapping[str, Any]
    """Pod template with an empty replica label."""


@dataclass(frozen=True, slots=True)
class RevisionData:
    """What a ControllerRevision keeps: enough to make a replica without looking at the Model's spec."""

    revision: str
    ordinal: int
    """Counts up with each revision of the Model."""
    image: str
    weights: Weights | None
    rendered_by: str
    """Version of the operator that rendered it."""
    digest: str
    """`templates_digest` of its templates."""
    pools: Mapping[Role, RevisionPool]

    @property
    def templates(self) -> dict[Role, Mapping[str, Any]]:
        return {role: pool.template for role, pool in self.pools.items()}


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def revision_of(model: EffectiveModel, weights: Weights | None, update: str = "") -> str:
    """6 hex digits. `update` is the value of the Model's update annotation."""
    told = [pod_affecting(model.spec), weights.revision if weights else "", update]
    return hashlib.sha256(_json(told).encode()).hexdigest()[:6]


def pod_templates(
    model: EffectiveModel, revision: str, context: OperatorContext, weights: Weights | None
) -> dict[Role, Manifest]:
    """The templates that this operator would make now, by role."""
    return {pool.role: pod_template(model, pool, revision, context, weights) for pool in model.pools}


def templates_digest(templates: Mapping[Role, Mapping[str, Any]]) -> str:
    """Equal templates have equal digests, across operators."""
    return hashlib.sha256(_json(dict(templates)).encode()).hexdigest()[:16]


def controller_revision(
    model: EffectiveModel,
    revision: str,
    ordinal: int,
    templates: Mapping[Role, Mapping[str, Any]],
    context: OperatorContext,
    weights: Weights | None,
) -> Manifest:
    """The ControllerRevision of `revision`; its data never changes once it is made."""
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": metadata(model, names.revision_name(model.name, revision), labels(model, revision=revision)),
        "revision": ordinal,
        "data": {
            "format": DATA_FORMAT,
            "revision": revision,
            "image": image_of(model, context),
            "weights": None
            if weights is None
            else {"revision": weights.revision, "sizeBytes": weights.size_bytes, "path": weights.path},
            "renderedBy": context.version,
            "digest": templates_digest(templates),
            "pools": {
                pool.role: {"pods": pool.pods, "devices": pool.devices, "template": dict(templates[pool.role])}
                for pool in model.pools
            },
        },
    }


def read_controller_revision(stored: Mapping[str, Any]) -> RevisionData:
    """What `controller_revision` kept. Raises RevisionDataError."""
    try:
        data = stored["data"]
        if data["format"] != DATA_FORMAT:
            raise ValueError(f"its format is {data['format']}, this operator reads {DATA_FORMAT}")
        kept = data.get("weights")  # API servers may drop a null
        return RevisionData(
            revision=data["revision"],
            ordinal=stored["revision"],
            image=data["image"],
            weights=None if kept is None else Weights(kept["revision"], kept["sizeBytes"], kept["path"]),
            rendered_by=data["renderedBy"],
            digest=data["digest"],
            pools={
                cast("Role", role): RevisionPool(pool["pods"], pool["devices"], pool["template"])
                for role, pool in data["pools"].items()
                if role in ROLES
            },
        )
    except (KeyError, TypeError, ValueError) as error:
        name = (stored.get("metadata") or {}).get("name", "")
        raise RevisionDataError(
            f"the ControllerRevision {name!r} cannot be read ({error!r}): it was written by another version or by "
            f"hand; a new value of the annotation {names.UPDATE_ANNOTATION} on the Model makes a new revision"
        ) from error
