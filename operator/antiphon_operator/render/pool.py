"""The `Pool` object of one pool: a stable name with `/scale`, whoever owns the number of replicas."""

from __future__ import annotations

from antiphon_operator import names
from antiphon_operator.render.metadata import Manifest, labels, metadata
from antiphon_operator.resource.effective import EffectiveModel, EffectivePool


def pool_object(model: EffectiveModel, pool: EffectivePool, replicas: int | None) -> Manifest:
    """`replicas` None: another manager owns the field, so it is not among what is applied."""
    spec: Manifest = {"role": pool.role}
    if replicas is not None:
        spec["replicas"] = replicas
    return {
        "apiVersion": names.API_VERSION,
        "kind": "Pool",
        "metadata": metadata(model, names.pool_name(model.name, pool.role), labels(model, role=pool.role)),
        "spec": spec,
    }
