"""What a change of each field does: makes a new revision, is taken over in place, or is refused.

A *new revision* restarts pods, in pairs and with both revisions serving meanwhile. What is *in place* never touches a
pod. Every leaf of the spec has a row here, with its reason; a test fails for a field without one.

`pod_affecting` is the part of a spec that a revision is named by. It is canonical, so that a revision changes only
when its pods would: amounts are compared by value, and a field at its default counts as not written. Defaults are
never changed within v1alpha1 and a new field's default means what was before it, so a newer operator finds the same
revision for the same spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from antiphon_operator.resource.base import Resource, fields_of, plain
from antiphon_operator.resource.effective import default_accelerator
from antiphon_operator.resource.model import ModelSpec, Pool
from antiphon_operator.resource.quantities import normal_quantity


class Change(Enum):
    """What changing a field does."""

    NEW_REVISION = "new revision"
    IN_PLACE = "in place"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ChangeRule:
    """What changing one field does, and why."""

    change: Change
    why: str


def _new(why: str) -> ChangeRule:
    return ChangeRule(Change.NEW_REVISION, why)


def _in_place(why: str) -> ChangeRule:
    return ChangeRule(Change.IN_PLACE, why)


_POOL: Mapping[str, ChangeRule] = {
    "replicas": _in_place("replicas are added, or drained and removed; the others are untouched"),
    "parallelism.tensor": _new("a replica has other ranks"),
    "parallelism.pipeline": _new("a replica has other ranks"),
    "parallelism.expert": _new("experts are shared out otherwise"),
    "gpusPerPod": _new("a replica has other pods"),
    "resources.requests": _new("part of the pod"),
    "resources.limits": _new("part of the pod"),
    "podTemplate": _new("part of the pod"),
}

CHANGES: Mapping[str, ChangeRule] = {
    "source.uri": _new("other weights"),
    "source.revision": _new("other weights; resolved to a commit first"),
    "source.secretRef.name": _new("pods that download read it; in place where none does"),
    "source.secretRef.key": _new("pods that download read it; in place where none does"),
    "source.cache.type": _new("the weights lie elsewhere"),
    "source.cache.size": _new("part of the pod's volume"),
    "source.cache.claimName": _new("the weights lie elsewhere"),
    "names": _in_place("gateways learn names from the model record; workers know only the Model's key"),
    "maxContextTokens": _new("an option of the worker"),
    "engine.name": _new("an option of the worker"),
    "engine.dtype": _new("an option of the worker"),
    "engine.image": _new("the pod's image"),
    "engine.args": _new("options of the worker"),
    "accelerator.resource": _new("the pod's devices"),
    **{f"prefill.{path}": rule for path, rule in _POOL.items()},
    **{f"decode.{path}": rule for path, rule in _POOL.items()},
    "placement.sameTopology": _new("the pod's affinity"),
    "kvCache.blockTokens": _new("an option of the worker; both pools must have the same"),
    "kvCache.transfer.transport": _new("an option of the worker"),
    "kvCache.transfer.require": _in_place("only the condition TransferReady judges by it"),
    "kvCache.transfer.rdma.resource": _new("the pod's devices"),
    "kvCache.transfer.rdma.count": _new("the pod's devices"),
    "kvCache.transfer.rdma.networks": _new("the pod's networks"),
    "kvCache.tiers": ChangeRule(Change.REFUSED, "reserved: engines of this version keep KV blocks on the device only"),
    "kvCache.isolation": _in_place("gateways learn it from the model record; blocks cached before are not found again"),
    "sla.ttft.p95": _in_place("routing and scaling go by it"),
    "sla.ttft.perThousandTokens": _in_place("routing and scaling go by it"),
    "sla.tpot.p95": _in_place("routing and scaling go by it"),
    "autoscaling.mode": _in_place("who decides about replicas; handing over keeps their number"),
    "autoscaling.prefill.min": _in_place("scaling goes by it"),
    "autoscaling.prefill.max": _in_place("scaling goes by it"),
    "autoscaling.decode.min": _in_place("scaling goes by it"),
    "autoscaling.decode.max": _in_place("scaling goes by it"),
    "autoscaling.gpuBudget": _in_place("scaling goes by it"),
    "rollout.surge": _in_place("the next step of a rollout goes by it"),
    "rollout.maxUnavailable": _in_place("the next step of a rollout goes by it"),
    "rollout.progressDeadline": _in_place("a running step is judged by it"),
    "rollout.drainTimeout": _in_place("the operator waits that long; pods do not know it"),
    "rollout.paused": _in_place("no further step is taken"),
    "imagePullSecrets": _new("part of the pod"),
    "serviceAccountName": _new("part of the pod"),
    "caBundle.name": _new("mounted where the weights are downloaded; in place where no pod downloads"),
    "caBundle.key": _new("mounted where the weights are downloaded; in place where no pod downloads"),
    "proxy.httpProxy": _new("the environment of downloads; in place where no pod downloads"),
    "proxy.httpsProxy": _new("the environment of downloads; in place where no pod downloads"),
    "proxy.noProxy": _new("the environment of downloads; in place where no pod downloads"),
}
"""By the field's path in the spec. Adding or removing `prefill` as a whole is a new revision too."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One field that holds a value rather than further fields."""

    path: str
    default: Any
    """In JSON. NODEFAULT where the field has to be written."""


def leaves(resource: type[Resource] = ModelSpec, prefix: str = "") -> Iterator[Leaf]:
    """All leaf fields of a type, in the order they are written in. A list or a map is one leaf."""
    for field in fields_of(resource):
        path = f"{prefix}{field.encode_name}"
        inner = _resource_in(field.type)
        if inner is not None:
            yield from leaves(inner, f"{path}.")
        elif field.default_factory is not msgspec.NODEFAULT:
            yield Leaf(path, field.default_factory())
        else:
            yield Leaf(path, [] if field.default == () else field.default)


def _resource_in(annotation: Any) -> type[Resource] | None:
    """The struct behind `Annotated[X | None, ...]`; None for a scalar, a list or a map."""
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, Resource) else None
    parts: tuple[Any, ...] = getattr(annotation, "__args__", ())
    origin = getattr(annotation, "__origin__", None)
    if origin in (tuple, dict):
        return None
    return next((found for part in parts if (found := _resource_in(part)) is not None), None)


def pod_affecting(spec: ModelSpec) -> dict[str, Any]:
    """What the spec's pods are made of, canonical: equal for specs whose pods are equal. Plain JSON values."""
    kept: dict[str, Any] = {"decode": {}}
    if spec.prefill is not None:
        kept["prefill"] = {}
    raw = plain(spec)
    for leaf in leaves():
        if CHANGES[leaf.path].change is not Change.NEW_REVISION:
            continue
        value = _value_at(raw, leaf.path)
        normal = _NORMAL.get(leaf.path)
        if normal is not None and value is not None:
            value = normal(value, spec)
        if value is not None and value != leaf.default:
            _put(kept, leaf.path, value)
    return kept


def _value_at(raw: Any, path: str) -> Any:
    """None where there is no such object."""
    for key in path.split("."):
        if raw is None:
            return None
        raw = raw[key]
    return raw


def _put(kept: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        kept = kept.setdefault(key, {})
    kept[last] = value


def _amounts(value: dict[str, str | int], _: ModelSpec) -> dict[str, str]:
    return {name: normal_quantity(amount) for name, amount in value.items()}


def _accelerator(value: str, spec: ModelSpec) -> str | None:
    """Writing what would have been chosen changes no pod."""
    return None if value == default_accelerator(spec) else value


def _gpus_per_pod(pool: Callable[[ModelSpec], Pool | None]) -> Callable[[int, ModelSpec], int | None]:
    def normal(value: int, spec: ModelSpec) -> int | None:
        of = pool(spec)
        return None if of is None or value == of.parallelism.ranks else value

    return normal


def _where_pods_download(value: Any, spec: ModelSpec) -> Any:
    source = spec.source
    downloads = source.uri.startswith("hf://") and source.cache.type == "Ephemeral" and spec.engine.name != "timed"
    return value if downloads else None


def _with_rdma(value: Any, spec: ModelSpec) -> Any:
    return None if spec.kv_cache.transfer.rdma.resource in ("", "none") else value


_NORMAL: Mapping[str, Callable[[Any, ModelSpec], Any]] = {
    "source.secretRef.name": _where_pods_download,
    "source.secretRef.key": _where_pods_download,
    "source.cache.size": lambda value, _: normal_quantity(value),
    "caBundle.name": _where_pods_download,
    "caBundle.key": _where_pods_download,
    "proxy.httpProxy": _where_pods_download,
    "proxy.httpsProxy": _where_pods_download,
    "proxy.noProxy": _where_pods_download,
    "accelerator.resource": _accelerator,
    "kvCache.transfer.rdma.resource": _with_rdma,
    "kvCache.transfer.rdma.count": _with_rdma,
    "kvCache.transfer.rdma.networks": _with_rdma,
    "prefill.gpusPerPod": _gpus_per_pod(lambda spec: spec.prefill),
    "decode.gpusPerPod": _gpus_per_pod(lambda spec: spec.decode),
    **{f"{pool}.resources.{which}": _amounts for pool in ("prefill", "decode") for which in ("requests", "limits")},
}
"""How a value is made canonical. None: it makes no difference to this spec's pods."""
