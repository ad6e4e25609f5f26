"""A Model with every default worked out: what the planner and the renderer read, and what `status.effective` echoes.

Defaults that depend on other fields cannot stand in the CRD. They are made here, once, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from antiphon_operator.names import Role, model_key
from antiphon_operator.resource.base import plain
from antiphon_operator.resource.model import ModelSpec, Pool


@dataclass(frozen=True, slots=True)
class EffectivePool:
    """One pool. `ranks = tensor x pipeline`; a replica has `pods` pods of `gpus_per_pod` ranks each."""

    role: Role
    spec: Pool
    ranks: int
    gpus_per_pod: int
    pods: int

    @property
    def devices(self) -> int:
        """Accelerators of one replica; 0 ranks on no accelerator count as none elsewhere."""
        return self.ranks


@dataclass(frozen=True, slots=True)
class EffectiveModel:
    """One Model, ready to be planned and rendered."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: ModelSpec
    names: tuple[str, ...]
    accelerator: str | None
    """Extended resource of one device; None: no accelerator."""
    pools: tuple[EffectivePool, ...]
    """Prefill first, if there is one; decode last."""

    @property
    def key(self) -> str:
        return model_key(self.namespace, self.name)

    @property
    def aggregated(self) -> bool:
        return self.spec.prefill is None

    def pool(self, role: Role) -> EffectivePool | None:
        return next((pool for pool in self.pools if pool.role == role), None)


def _pool(role: Role, spec: Pool) -> EffectivePool:
    ranks = spec.parallelism.ranks
    gpus_per_pod = spec.gpus_per_pod or ranks
    return EffectivePool(role=role, spec=spec, ranks=ranks, gpus_per_pod=gpus_per_pod, pods=ranks // gpus_per_pod)


def default_accelerator(spec: ModelSpec) -> str:
    """What an empty `accelerator.resource` stands for: an extended resource, or `none`."""
    return "none" if spec.source.uri == "demo" or spec.engine.name == "timed" else "nvidia.com/gpu"


def effective_model(*, namespace: str, name: str, uid: str, generation: int, spec: ModelSpec) -> EffectiveModel:
    """Work out the defaults. The spec has passed the CRD's rules and `resource.checks`."""
    asked = spec.accelerator.resource or default_accelerator(spec)
    pools = () if spec.prefill is None else (_pool("prefill", spec.prefill),)
    return EffectiveModel(
        namespace=namespace,
        name=name,
        uid=uid,
        generation=generation,
        spec=spec,
        names=spec.names or (name,),
        accelerator=None if asked == "none" else asked,
        pools=(*pools, _pool("decode", spec.decode)),
    )


def effective_dict(model: EffectiveModel) -> dict[str, Any]:
    """The spec with every default in it, for `status.effective`: plain JSON in the spec's own words."""
    raw = plain(model.spec)
    raw["names"] = list(model.names)
    raw["accelerator"] = {"resource": model.accelerator or "none"}
    for pool in model.pools:
        raw[pool.role]["gpusPerPod"] = pool.gpus_per_pod
    if model.aggregated:
        del raw["autoscaling"]["prefill"]
    return _written(raw)


def _written(value: dict[str, Any]) -> dict[str, Any]:
    """Without what has no default to show: empty texts, lists and objects. Pod templates are echoed as they are."""
    written = {}
    for key, inner in value.items():
        kept = _written(inner) if isinstance(inner, dict) and key != "podTemplate" else inner
        if kept is not None and kept not in ("", {}, []):
            written[key] = kept
    return written
