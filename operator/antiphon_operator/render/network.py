"""The NetworkPolicy of a Model: who may reach its pods, and what they may reach.

A peer that holds a worker's transport metadata can read its whole KV pool, so among workers only those of the same
Model get through, on all ports (UCX picks its own). Gateways and operators get gRPC and the status pages. The status
port is open to all: the kubelet's probes and the node's Prometheus come from addresses that no selector names, and
the pages hold no prompts. Redis, the collector of traces and the hub may be anywhere, so only their ports are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from antiphon_operator import names
from antiphon_operator.options import OperatorContext
from antiphon_operator.render.metadata import Manifest, labels, metadata
from antiphon_operator.render.weights import needs_source_job
from antiphon_operator.resource.effective import EffectiveModel

_DNS_PORT = 53
_DEFAULT_PORTS = {"http": 80, "https": 443, "redis": names.REDIS_PORT, "rediss": names.REDIS_PORT}
_OTLP_GRPC_PORT = 4317


def network_policy(model: EffectiveModel, context: OperatorContext) -> Manifest:
    """Of all pods of the Model, its Job's too."""
    own: Manifest = {"podSelector": {"matchLabels": {names.MODEL_LABEL: model.name}}}
    platform: Manifest = {
        "namespaceSelector": {},
        "podSelector": {
            "matchLabels": {names.NAME_LABEL: names.APP},
            "matchExpressions": [
                {"key": names.COMPONENT_LABEL, "operator": "In", "values": ["gateway", "operator"]},
            ],
        },
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(model, names.network_policy_name(model.name), labels(model)),
        "spec": {
            **own,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {"from": [own]},
                {"from": [platform], "ports": _tcp([names.GRPC_PORT, names.STATUS_PORT])},
                {"ports": _tcp([names.STATUS_PORT])},
            ],
            "egress": [
                {"to": [own]},
                {"ports": [{"protocol": "UDP", "port": _DNS_PORT}, *_tcp([_DNS_PORT])]},
                {"ports": _tcp(_outside_ports(model, context))},
            ],
        },
    }


def _tcp(ports: Sequence[int]) -> list[Manifest]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def _outside_ports(model: EffectiveModel, context: OperatorContext) -> list[int]:
    """Redis, the collector of traces, and where weights come from."""
    ports = {_port(context.worker_redis_url, names.REDIS_PORT)}
    if context.otlp_endpoint:
        ports.add(_port(context.otlp_endpoint, _OTLP_GRPC_PORT))
    if needs_source_job(model):
        proxy = model.spec.proxy
        ports |= {80, 443} | {_port(url, 80) for url in (proxy.http_proxy, proxy.https_proxy) if url}
    return sorted(ports)


def _port(url: str, otherwise: int) -> int:
    """The port of `url`, which need not have a scheme."""
    parts = urlsplit(url if "://" in url else f"//{url}")
    return parts.port or _DEFAULT_PORTS.get(parts.scheme, otherwise)
