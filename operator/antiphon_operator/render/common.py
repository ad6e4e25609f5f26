"""Objects of a Model beside its replicas: Service, ServiceAccount, disruption budgets, Secrets, PodMonitor."""

from __future__ import annotations

import base64

from antiphon_operator import names
from antiphon_operator.render.metadata import WORKER, Manifest, labels, metadata, worker_selector
from antiphon_operator.render.volumes import RAY_TOKEN_KEY, REDIS_PASSWORD_KEY
from antiphon_operator.resource.effective import EffectiveModel, EffectivePool


def headless_service(model: EffectiveModel) -> Manifest:
    """Names of the pods, from before they are ready: the pods of a gang find the first one by it."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(model, names.headless_service_name(model.name), labels(model, WORKER)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": worker_selector(model),
            "ports": [
                {"name": "grpc", "port": names.GRPC_PORT, "protocol": "TCP"},
                {"name": "status", "port": names.STATUS_PORT, "protocol": "TCP"},
            ],
        },
    }


def service_account(model: EffectiveModel) -> Manifest:
    """An identity without rights and without a token: no worker speaks to the API server."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(model, names.service_account_name(model.name), labels(model, WORKER)),
        "automountServiceAccountToken": False,
    }


def disruption_budget(model: EffectiveModel, pool: EffectivePool) -> Manifest:
    """At most one pod of the pool away at a time, and so at most one replica: a gang without one pod is no gang, and
    a budget of a gang's size would let one pod of each of several gangs go. Broken pods may always be evicted."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(
            model, names.disruption_budget_name(model.name, pool.role), labels(model, WORKER, pool.role)
        ),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": worker_selector(model, pool.role)},
        },
    }


def redis_secret(model: EffectiveModel, password: str) -> Manifest:
    """The password of the Model's own Redis user. The runtime adds it to a plan; the planner never sees it."""
    return _secret(model, names.redis_secret_name(model.name), REDIS_PASSWORD_KEY, password)


def ray_secret(model: EffectiveModel, token: str) -> Manifest:
    """The token of the Model's gangs. The runtime adds it to a plan; the planner never sees it."""
    return _secret(model, names.ray_secret_name(model.name), RAY_TOKEN_KEY, token)


def _secret(model: EffectiveModel, name: str, key: str, value: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(model, name, labels(model, WORKER)),
        "type": "Opaque",
        "data": {key: base64.b64encode(value.encode()).decode()},
    }


def pod_monitor(model: EffectiveModel) -> Manifest:
    """For the Prometheus operator, where it is installed."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(model, names.pod_monitor_name(model.name), labels(model, WORKER)),
        "spec": {
            "selector": {"matchLabels": worker_selector(model)},
            "podMetricsEndpoints": [{"port": "status", "path": "/metrics", "interval": "15s"}],
        },
    }
