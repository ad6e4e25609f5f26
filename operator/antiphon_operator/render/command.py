"""The command line of a worker pod: `antiphon worker MODEL --name ns/model --role ...`.

A replica of one pod runs the worker with a plain argument list. In a gang of several, all pods have one template
(they are one StatefulSet), and the first has to be told from the others; Kubernetes has no way of saying that in a
template but by the pod's index, so the command is a shell line that reads it and becomes the worker (`exec`: signals
reach it, no shell stays).
"""

from __future__ import annotations

from antiphon_operator import names
from antiphon_operator.options import OperatorContext
from antiphon_operator.render.environment import from_field, plain
from antiphon_operator.render.metadata import Manifest
from antiphon_operator.render.volumes import RAY_TOKEN_FILE, REDIS_PASSWORD_FILE
from antiphon_operator.render.weights import Weights
from antiphon_operator.resource.effective import EffectiveModel, EffectivePool

DRAIN_TIMEOUT_S = 25
"""How long running requests may take to end after SIGTERM."""
TERMINATION_GRACE_S = 40
"""Drain, then leave: the rest is for closing streams and giving back memory."""

POD_INDEX_LABEL = "apps.kubernetes.io/pod-index"

_GANG = (
    'if [ "$POD_INDEX" = 0 ]; then exec antiphon worker "$@" --ray-head; '
    'else exec antiphon worker "$@" --ray-join "$GANG_HEAD"; fi'
)


def worker_command(pool: EffectivePool) -> list[str]:
    """The container's `command`; its `args` are the same either way."""
    return ["antiphon", "worker"] if pool.pods == 1 else ["sh", "-c", _GANG, "antiphon-worker"]


def gang_environment(model: EffectiveModel, pool: EffectivePool, revision: str) -> list[Manifest]:
    """For a gang of several pods: which one this is, and where the first is."""
    if pool.pods == 1:
        return []
    first = names.replica_name(model.name, pool.role, revision, "$(REPLICA)") + "-0"
    service = names.headless_service_name(model.name)
    return [
        from_field("POD_INDEX", f"metadata.labels['{POD_INDEX_LABEL}']"),
        from_field("REPLICA", f"metadata.labels['{names.REPLICA_LABEL}']"),
        plain("GANG_HEAD", f"{first}.{service}.{model.namespace}.svc:{names.RAY_PORT}"),
    ]


def worker_arguments(
    model: EffectiveModel, pool: EffectivePool, revision: str, context: OperatorContext, weights: Weights | None
) -> list[str]:
    """`$(POD_NAME)` and `$(POD_IP)` are put in by the kubelet."""
    spec = model.spec
    role = "both" if model.aggregated else pool.role
    found = [
        weights.path if weights else "demo",
        *("--name", model.key, "--role", role, "--revision", revision),
        *("--worker-id", "$(POD_NAME)", "--host", "$(POD_IP)", "--advertise-host", "$(POD_IP)"),
        *("--port", str(names.GRPC_PORT), "--status-port", str(names.STATUS_PORT)),
        *("--engine", spec.engine.name, "--dtype", spec.engine.dtype),
        *("--block-tokens", str(spec.kv_cache.block_tokens), "--transport", spec.kv_cache.transfer.transport),
    ]
    if spec.max_context_tokens is not None:
        found += ["--max-context-tokens", str(spec.max_context_tokens)]
    for flag, degree in (
        ("--tensor-parallel", pool.spec.parallelism.tensor),
        ("--pipeline-parallel", pool.spec.parallelism.pipeline),
        ("--expert-parallel", pool.spec.parallelism.expert),
    ):
        if degree > 1:
            found += [flag, str(degree)]
    if pool.pods > 1:
        found += ["--ray-node-ranks", str(pool.gpus_per_pod), "--ray-token-file", RAY_TOKEN_FILE]
    found += ["--redis-url", context.worker_redis_url]
    if context.redis_configured:
        user = names.redis_user(model.namespace, model.name)
        found += ["--redis-username", user, "--redis-password-file", REDIS_PASSWORD_FILE]
    found += ["--no-list-model", "--drain-timeout-s", str(DRAIN_TIMEOUT_S), "--log-json"]
    return [*found, *spec.engine.args]
