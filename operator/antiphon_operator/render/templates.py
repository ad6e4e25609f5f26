"""The pod template of one pool: what a ControllerRevision keeps and every replica of the revision is made of.

It holds no replica's id; where one belongs (the replica label) it has an empty slot. The init container is there only
where each pod fetches its own weights.
"""

from __future__ import annotations

from antiphon_operator import names
from antiphon_operator.options import OperatorContext
from antiphon_operator.render.command import (
    TERMINATION_GRACE_S,
    gang_environment,
    worker_arguments,
    worker_command,
)
from antiphon_operator.render.environment import fetch_environment, worker_environment
from antiphon_operator.render.merge import merge_pod_template
from antiphon_operator.render.metadata import WORKER, Manifest, labels
from antiphon_operator.render.placement import affinity, tolerations, with_lost_node_tolerations
from antiphon_operator.render.probes import worker_probes
from antiphon_operator.render.security import (
    container_security,
    network_annotations,
    pod_security,
    rdma_resources,
    uses_rdma,
)
from antiphon_operator.render.volumes import (
    authorities,
    ephemeral_size,
    fetches_itself,
    scratch,
    worker_volumes,
)
from antiphon_operator.render.weights import MODELS_FOLDER, Weights
from antiphon_operator.resource.effective import EffectiveModel, EffectivePool
from antiphon_operator.resource.quantities import normal_quantity

FETCH_RESOURCES: Manifest = {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "4Gi"}}
"""Of containers that fetch weights: they stream to disk."""


def image_of(model: EffectiveModel, context: OperatorContext) -> str:
    """The worker image that a revision made now would have."""
    return model.spec.engine.image or context.worker_image


def pod_template(
    model: EffectiveModel, pool: EffectivePool, revision: str, context: OperatorContext, weights: Weights | None
) -> Manifest:
    """The pod template of `pool`. `weights` is None where the image has the model in it."""
    rendered: Manifest = {
        "metadata": {"labels": labels(model, WORKER, pool.role, revision) | {names.REPLICA_LABEL: ""}},
        "spec": _spec(model, pool, revision, context, weights),
    }
    annotations = network_annotations(model)
    if annotations:
        rendered["metadata"]["annotations"] = annotations
    template = merge_pod_template(rendered, pool.spec.pod_template)
    template["spec"]["tolerations"] = with_lost_node_tolerations(template["spec"]["tolerations"])
    return template


def _spec(
    model: EffectiveModel, pool: EffectivePool, revision: str, context: OperatorContext, weights: Weights | None
) -> Manifest:
    volumes = worker_volumes(model, pool, context, weights)
    worker: Manifest = {
        "name": "worker",
        "image": image_of(model, context),
        "command": worker_command(pool),
        "args": worker_arguments(model, pool, revision, context, weights),
        "env": [*worker_environment(model, context), *gang_environment(model, pool, revision)],
        "ports": _ports(pool),
        "resources": _resources(model, pool, weights),
        "securityContext": container_security(rdma=uses_rdma(model)),
        "volumeMounts": [volume.mount for volume in volumes],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **worker_probes(weights),
    }
    spec: Manifest = {
        **pod_defaults(model),
        "containers": [worker],
        "volumes": [volume.volume for volume in volumes],
        "terminationGracePeriodSeconds": TERMINATION_GRACE_S,
        "tolerations": tolerations(),
    }
    if weights is not None and fetches_itself(model):
        spec["initContainers"] = [_fetch(model, context, weights)]
        spec["volumes"] += [volume.volume for volume in authorities(model)]
    near = affinity(model, pool, revision)
    if near is not None:
        spec["affinity"] = near
    return spec


def pod_defaults(model: EffectiveModel) -> Manifest:
    """What all pods of the Model have, workers and Job. Service links would be taken for options of ours."""
    spec: Manifest = {
        "serviceAccountName": model.spec.service_account_name or names.service_account_name(model.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
    }
    if model.spec.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret.name} for secret in model.spec.image_pull_secrets]
    return spec


def _ports(pool: EffectivePool) -> list[Manifest]:
    found = [
        {"name": "grpc", "containerPort": names.GRPC_PORT, "protocol": "TCP"},
        {"name": "status", "containerPort": names.STATUS_PORT, "protocol": "TCP"},
    ]
    if pool.pods > 1:
        found.append({"name": "ray", "containerPort": names.RAY_PORT, "protocol": "TCP"})
    return found


def _resources(model: EffectiveModel, pool: EffectivePool, weights: Weights | None) -> Manifest:
    """What the pool asks for, and the devices that follow from its shape. Extended resources are stated in both."""
    devices = rdma_resources(model)
    if model.accelerator is not None:
        devices[model.accelerator] = str(pool.gpus_per_pod)
    requests = {name: normal_quantity(amount) for name, amount in pool.spec.resources.requests.items()} | devices
    limits = {name: normal_quantity(amount) for name, amount in pool.spec.resources.limits.items()} | devices
    if weights is not None and fetches_itself(model) and "ephemeral-storage" not in limits:
        # Else the pod lands on a node whose disk is too small, and is evicted in the middle of the download.
        requests.setdefault("ephemeral-storage", ephemeral_size(model, weights))
    found: Manifest = {}
    if requests:
        found["requests"] = requests
    if limits:
        found["limits"] = limits
    return found


def _fetch(model: EffectiveModel, context: OperatorContext, weights: Weights) -> Manifest:
    """The commit is given, so all pods of the revision load the same bytes."""
    source = model.spec.source
    return {
        "name": "fetch",
        "image": image_of(model, context),
        "command": ["antiphon", "fetch"],
        "args": [source.uri, "--revision", weights.revision, "--to", MODELS_FOLDER],
        "env": fetch_environment(model),
        "resources": FETCH_RESOURCES,
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "weights", "mountPath": MODELS_FOLDER},
            scratch().mount,
            *(volume.mount for volume in authorities(model)),
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
