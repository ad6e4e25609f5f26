"""Volumes of a worker pod: shared memory, scratch space, the weights, and what is secret. All of them have a size.

Each volume comes with the mount that uses it, so that neither is ever rendered without the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon_operator import names
from antiphon_operator.options import OperatorContext
from antiphon_operator.render.environment import CA_FILE, CA_FOLDER
from antiphon_operator.render.metadata import Manifest
from antiphon_operator.render.weights import CLAIM, MODELS_FOLDER, Weights, claim_of
from antiphon_operator.resource.effective import EffectiveModel, EffectivePool
from antiphon_operator.resource.quantities import normal_quantity

REDIS_FOLDER = "/etc/antiphon/redis"
REDIS_PASSWORD_KEY = "password"
REDIS_PASSWORD_FILE = f"{REDIS_FOLDER}/{REDIS_PASSWORD_KEY}"

RAY_FOLDER = "/etc/antiphon/ray"
RAY_TOKEN_KEY = "token"
RAY_TOKEN_FILE = f"{RAY_FOLDER}/{RAY_TOKEN_KEY}"

SCRATCH_SIZE = "2Gi"
SHARED_MEMORY_GIB_PER_RANK = 1
"""UCX moves blocks between pods of one node, and ranks talk to each other, through /dev/shm."""

_GROUP_MAY_READ = 0o440
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume of the pod, and where its worker container sees it."""

    volume: Manifest
    mount: Manifest


def worker_volumes(
    model: EffectiveModel, pool: EffectivePool, context: OperatorContext, weights: Weights | None
) -> list[Volume]:
    """All volumes of the worker container."""
    found = [shared_memory(pool), scratch()]
    if weights is not None:
        found.append(weights_volume(model, weights))
    if context.redis_configured:
        found.append(redis_password(model))
    if pool.pods > 1:
        found.append(ray_token(model))
    return found


def shared_memory(pool: EffectivePool) -> Volume:
    size = f"{SHARED_MEMORY_GIB_PER_RANK * pool.gpus_per_pod}Gi"
    return Volume(
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
        {"name": "shm", "mountPath": "/dev/shm"},
    )


def scratch(size: str = SCRATCH_SIZE) -> Volume:
    return Volume(
        {"name": "tmp", "emptyDir": {"sizeLimit": size}},
        {"name": "tmp", "mountPath": "/tmp"},
    )


def fetches_itself(model: EffectiveModel) -> bool:
    """Whether each pod downloads its own weights, in an init container."""
    return not model.spec.source.uri.startswith(CLAIM) and model.spec.source.cache.type == "Ephemeral"


def ephemeral_size(model: EffectiveModel, weights: Weights) -> str:
    """What was asked for, or the weights with a tenth and a GiB to spare."""
    if model.spec.source.cache.size is not None:
        return normal_quantity(model.spec.source.cache.size)
    return f"{weights.size_bytes * 11 // 10 // _MIB + 1024}Mi"


def weights_volume(model: EffectiveModel, weights: Weights) -> Volume:
    """The worker reads; only the init container and the Job write."""
    if fetches_itself(model):
        return Volume(
            {"name": "weights", "emptyDir": {"sizeLimit": ephemeral_size(model, weights)}},
            {"name": "weights", "mountPath": MODELS_FOLDER, "readOnly": True},
        )
    uri = model.spec.source.uri
    if uri.startswith(CLAIM):
        claim, folder, _ = claim_of(uri)
    else:
        claim, folder = model.spec.source.cache.claim_name, weights.folder
    mount: Manifest = {"name": "weights", "mountPath": weights.mount_path, "readOnly": True}
    if folder:
        mount["subPath"] = folder
    return Volume({"name": "weights", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}, mount)


def redis_password(model: EffectiveModel) -> Volume:
    return _secret("redis", names.redis_secret_name(model.name), REDIS_FOLDER)


def ray_token(model: EffectiveModel) -> Volume:
    return _secret("ray", names.ray_secret_name(model.name), RAY_FOLDER)


def _secret(volume: str, secret_name: str, folder: str) -> Volume:
    """Not optional: the operator writes the Secret before the first pod."""
    secret = {"secretName": secret_name, "defaultMode": _GROUP_MAY_READ}
    return Volume(
        {"name": volume, "secret": secret},
        {"name": volume, "mountPath": folder, "readOnly": True},
    )


def authorities(model: EffectiveModel) -> list[Volume]:
    """The CA bundle, if the Model names one: for containers that fetch weights."""
    bundle = model.spec.ca_bundle
    if bundle is None:
        return []
    config_map = {"name": bundle.name, "items": [{"key": bundle.key, "path": CA_FILE}]}
    return [
        Volume({"name": "ca", "configMap": config_map}, {"name": "ca", "mountPath": CA_FOLDER, "readOnly": True}),
    ]
