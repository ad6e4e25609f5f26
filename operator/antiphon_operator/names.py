"""Words of the API: group, labels, annotations, ports, and how children are named.

Every name of an object that the operator makes is made here, so that nothing is ever found by a pattern.
"""

from __future__ import annotations

import hashlib
from typing import Literal

GROUP = "antiphon.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
FIELD_MANAGER = "antiphon-operator"

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")
"""The pools a Model may have. Without a prefill pool the decode pool's workers do both."""

# -- labels, on every child

MODEL_LABEL = f"{GROUP}/model"
ROLE_LABEL = f"{GROUP}/role"
REVISION_LABEL = f"{GROUP}/revision"
REPLICA_LABEL = f"{GROUP}/replica"
"""The replica's id: on the StatefulSet of one replica and on its pods."""
NAME_LABEL = "app.kubernetes.io/name"
COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
APP = "antiphon"
MANAGED_BY = "antiphon-operator"

# -- annotations

APPLIED_ANNOTATION = f"{GROUP}/applied"
"""Digest of what was applied last: with it, fields that are no longer wanted are seen too."""
DRAINING_SINCE_ANNOTATION = f"{GROUP}/draining-since"
"""RFC 3339, on the StatefulSet of a replica that is to go."""
DRAIN_REASON_ANNOTATION = f"{GROUP}/drain-reason"
FAILED_ANNOTATION = f"{GROUP}/failed"
"""On a ControllerRevision whose rollout was given up: `<reason>: <message>`."""
COMPLETED_ANNOTATION = f"{GROUP}/completed"
"""RFC 3339, on a ControllerRevision: when it last was all there was. The newest of them is the revision to protect."""
STEP_ANNOTATION = f"{GROUP}/step"
"""On the ControllerRevision that is rolling out: the step under way, as JSON (`plan.memory.Step`)."""
SOURCE_ANNOTATION = f"{GROUP}/source"
"""On a ControllerRevision: content hash of the source that its weights were resolved from."""
WEIGHTS_ANNOTATION = f"{GROUP}/weights"
"""On the Job that got the weights: what it found, kept for when its pod is gone."""
ORDINAL_ANNOTATION = f"{GROUP}/ordinal"
"""On a replica's StatefulSet: the number that its id was made from."""
WHOLE_ANNOTATION = f"{GROUP}/whole"
"""On the StatefulSet of a gang that was ready once: digest of its pods then. Others later mean a broken gang."""
MEMORY_ANNOTATION = f"{GROUP}/memory"
"""On a Pool: the next ordinal, and failures of its gangs, as JSON (`plan.memory.PoolMemory`)."""
UPDATE_ANNOTATION = f"{GROUP}/update"
"""On a Model, set by a person: any new value makes a new revision from the operator's current templates."""
ROTATE_ANNOTATION = f"{GROUP}/rotate-credentials"
"""On a Model, set by a person: any new value makes a new Redis password, without a restart."""

# -- ports: fixed, so that a NetworkPolicy can name them

GRPC_PORT = 9000
STATUS_PORT = 9001
GATEWAY_PORT = 8000
REDIS_PORT = 6379
RAY_PORT = 6380

MAX_MODEL_NAME = 55
"""`<model>-prefill` has to fit into a label's 63 characters."""
_LONGEST_STEM = 32


def _stem(model: str) -> str:
    """The model's name, shortened where the name of a StatefulSet (at most 52) would not hold it."""
    if len(model) <= _LONGEST_STEM:
        return model
    digest = hashlib.sha256(model.encode()).hexdigest()[:6]
    return f"{model[: _LONGEST_STEM - 7].rstrip('-.')}-{digest}"


def model_key(namespace: str, model: str) -> str:
    """What the cluster's Redis and the workers call the model: unique where the names that clients use need not be."""
    return f"{namespace}/{model}"


def pool_name(model: str, role: Role) -> str:
    return f"{model}-{role}"


def revision_name(model: str, revision: str) -> str:
    """Of the ControllerRevision. `revision` is 6 hex digits."""
    return f"{model}-{revision}"


def replica_name(model: str, role: Role, revision: str, replica: str) -> str:
    """Of one replica's StatefulSet: at most 52 characters, as the pods' labels add to it."""
    return f"{_stem(model)}-{role}-{revision}-{replica}"


def headless_service_name(model: str) -> str:
    return f"{model}-workers"


def service_account_name(model: str) -> str:
    return f"{model}-worker"


def redis_secret_name(model: str) -> str:
    return f"{model}-redis"


def ray_secret_name(model: str) -> str:
    """Of the token by which the pods of the Model's gangs know each other."""
    return f"{model}-ray"


def network_policy_name(model: str) -> str:
    return f"{model}-workers"


def disruption_budget_name(model: str, role: Role) -> str:
    return f"{model}-{role}"


def pod_monitor_name(model: str) -> str:
    return f"{model}-workers"


def source_job_name(model: str, content: str) -> str:
    """Of the Job that resolves or fetches the weights; `content` is 8 hex digits of (uri, revision, cache)."""
    return f"{_stem(model)}-source-{content}"


def redis_user(namespace: str, model: str) -> str:
    """Of the ACL user that may touch this Model's keys only."""
    return f"antiphon-{hashlib.sha256(model_key(namespace, model).encode()).hexdigest()[:16]}"
