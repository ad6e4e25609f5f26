"""The StatefulSet of one replica: a gang of one or more pods, started together, never changed once made.

It is made of what the revision keeps and the replica's id, and of nothing else: the replicas of an old revision come
out the same under any operator. `OnDelete` because nothing may restart its pods but their own end. The operator
scales by making and deleting such sets, so it is the one that chooses which replica goes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from antiphon_operator import names
from antiphon_operator.names import Role
from antiphon_operator.render.metadata import WORKER, Manifest, labels, metadata
from antiphon_operator.render.revision import RevisionData
from antiphon_operator.resource.effective import EffectiveModel

KUEUE_LABELS = "kueue.x-k8s.io/"
"""Kueue reads a queue's name on the StatefulSet, so labels of its group in `podTemplate` are repeated there."""


def stateful_set(
    model: EffectiveModel,
    role: Role,
    data: RevisionData,
    replica: str,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """One replica. Of `model` only its identity is used. `annotations` are the operator's notes on it."""
    pool = data.pools[role]
    template = _filled(copy.deepcopy(dict(pool.template)), replica)
    own = labels(model, WORKER, role, data.revision) | {names.REPLICA_LABEL: replica}
    queue = {name: value for name, value in template["metadata"]["labels"].items() if name.startswith(KUEUE_LABELS)}
    selector = {
        names.MODEL_LABEL: model.name,
        names.ROLE_LABEL: role,
        names.REVISION_LABEL: data.revision,
        names.REPLICA_LABEL: replica,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(
            model, names.replica_name(model.name, role, data.revision, replica), {**queue, **own}, annotations
        ),
        "spec": {
            "replicas": pool.pods,
            "serviceName": names.headless_service_name(model.name),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": selector},
            "template": template,
        },
    }


def _filled(part: Any, replica: str) -> Any:
    """`part` with the replica's id in the slots that the template has for it."""
    if isinstance(part, dict):
        return {
            name: replica if name == names.REPLICA_LABEL and value == "" else _filled(value, replica)
            for name, value in part.items()
        }
    return [_filled(item, replica) for item in part] if isinstance(part, list) else part
