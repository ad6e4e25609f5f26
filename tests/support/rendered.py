"""Models of every shape, and all that is rendered for one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from antiphon_operator.options import OperatorContext
from antiphon_operator.render.common import (
    disruption_budget,
    headless_service,
    pod_monitor,
    ray_secret,
    redis_secret,
    service_account,
)
from antiphon_operator.render.network import network_policy
from antiphon_operator.render.pool import pool_object
from antiphon_operator.render.replica import stateful_set
from antiphon_operator.render.revision import (
    RevisionData,
    controller_revision,
    pod_templates,
    read_controller_revision,
    revision_of,
)
from antiphon_operator.render.source import source_job
from antiphon_operator.render.weights import MODELS_FOLDER, Weights, needs_source_job, weights_at_rest
from antiphon_operator.resource.effective import EffectiveModel, effective_model
from antiphon_operator.resource.model import parse_spec

CONTEXT = OperatorContext(
    version="0.1.0",
    worker_image="antiphon-worker:0.1.0",
    worker_redis_url="redis://antiphon-valkey.antiphon.svc:6379/0",
    endpoint="http://antiphon-gateway.antiphon.svc:8000",
    otlp_endpoint="http://collector.monitoring.svc:4317",
    pod_monitors=True,
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPLICA = "ab12"

HUB = {"uri": "hf://org/tiny", "secretRef": {"name": "hub-token"}}
SPECS: Mapping[str, dict[str, Any]] = {
    "demo": {"source": {"uri": "demo"}},
    "demo-pair": {"source": {"uri": "demo"}, "prefill": {}, "decode": {"replicas": 2}},
    "timed": {"source": {"uri": "hf://org/tiny"}, "engine": {"name": "timed"}, "prefill": {}},
    "ephemeral": {"source": {**HUB, "cache": {"size": "80Gi"}}, "prefill": {}},
    "claim": {
        "source": {**HUB, "revision": "v1", "cache": {"type": "Claim", "claimName": "weights"}},
        "proxy": {"httpsProxy": "http://proxy.corp:3128", "noProxy": ".corp"},
        "caBundle": {"name": "corp-ca"},
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccountName": "models",
    },
    "own-claim": {"source": {"uri": "pvc://weights/llama/8b"}, "maxContextTokens": 32768},
    "whole-claim": {"source": {"uri": "pvc://weights"}, "accelerator": {"resource": "amd.com/gpu"}},
    "gang": {
        "source": {"uri": "pvc://weights/large"},
        "decode": {"parallelism": {"tensor": 8, "pipeline": 2}, "gpusPerPod": 8},
        "placement": {"sameTopology": "topology.kubernetes.io/zone"},
    },
    "rdma": {
        "source": HUB,
        "prefill": {"parallelism": {"tensor": 2}},
        "kvCache": {"transfer": {"rdma": {"resource": "rdma/hca", "count": 2, "networks": ["fabric/a", "fabric/b"]}}},
        "placement": {"sameTopology": "topology.kubernetes.io/rack"},
    },
    "template": {
        "source": {"uri": "demo"},
        "decode": {
            "resources": {"requests": {"cpu": 4, "memory": "8Gi"}, "limits": {"memory": "8Gi"}},
            "podTemplate": {
                "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}, "annotations": {"team": "chat"}},
                "spec": {
                    "schedulerName": "volcano",
                    "priorityClassName": "high",
                    "nodeSelector": {"disk": "fast"},
                    "tolerations": [{"key": "gpu", "operator": "Exists"}],
                    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}],
                    "containers": [
                        {"name": "worker", "env": [{"name": "UCX_TLS", "value": "rc"}]},
                        {
                            "name": "logs",
                            "image": "logs:1",
                            "securityContext": {
                                "allowPrivilegeEscalation": False,
                                "readOnlyRootFilesystem": True,
                                "capabilities": {"drop": ["ALL"]},
                            },
                        },
                    ],
                },
            },
        },
    },
}


@dataclass(frozen=True)
class Rendered:
    """One Model with all its children, as `antiphon_operator.render` makes them."""

    model: EffectiveModel
    weights: Weights | None
    data: RevisionData
    manifests: tuple[dict[str, Any], ...]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def pod(self, role: str = "decode") -> dict[str, Any]:
        """The pod template of the role's replica."""
        sets = self.of_kind("StatefulSet")
        found = next(one for one in sets if one["metadata"]["labels"]["antiphon.dev/role"] == role)
        template: dict[str, Any] = found["spec"]["template"]
        return template

    def worker(self, role: str = "decode") -> dict[str, Any]:
        """Its worker container."""
        found: dict[str, Any] = self.pod(role)["spec"]["containers"][0]
        assert found["name"] == "worker"
        return found


def model_of(spec: Mapping[str, Any], *, name: str = "tiny", namespace: str = "chat") -> EffectiveModel:
    return effective_model(namespace=namespace, name=name, uid="uid-1", generation=1, spec=parse_spec(dict(spec)))


def weights_of(model: EffectiveModel, size_bytes: int = 16_000_000_000) -> Weights | None:
    """As if the Job had found them."""
    if not needs_source_job(model):
        return weights_at_rest(model)
    return Weights(revision=COMMIT, size_bytes=size_bytes, path=f"{MODELS_FOLDER}/org--tiny--{COMMIT}")


def render(spec: Mapping[str, Any], *, name: str = "tiny", context: OperatorContext = CONTEXT) -> Rendered:
    model = model_of(spec, name=name)
    weights = weights_of(model)
    revision = revision_of(model, weights)
    kept = controller_revision(model, revision, 1, pod_templates(model, revision, context, weights), context, weights)
    data = read_controller_revision(kept)
    manifests = [
        service_account(model),
        headless_service(model),
        redis_secret(model, "secret"),
        network_policy(model, context),
        pod_monitor(model),
        kept,
        *(pool_object(model, pool, pool.spec.replicas) for pool in model.pools),
        *(disruption_budget(model, pool) for pool in model.pools),
        *(stateful_set(model, pool.role, data, REPLICA) for pool in model.pools),
    ]
    if any(pool.pods > 1 for pool in model.pools):
        manifests.append(ray_secret(model, "token"))
    if needs_source_job(model):
        manifests.append(source_job(model, context))
    return Rendered(model, weights, data, tuple(manifests))
