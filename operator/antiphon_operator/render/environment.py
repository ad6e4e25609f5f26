"""Environment variables of the Model's containers.

Proxies and certificates are given only to containers that fetch weights. A worker reaches its peers by gRPC, which
would go through an `http_proxy` it finds; and it needs nothing outside the cluster.
"""

from __future__ import annotations

from antiphon_operator.options import OperatorContext
from antiphon_operator.render.metadata import Manifest
from antiphon_operator.resource.effective import EffectiveModel

CA_FOLDER = "/etc/antiphon/ca"
CA_FILE = "ca.crt"
INSIDE = ("localhost", "127.0.0.1", ".svc", ".cluster.local")
"""Reached without a proxy, whatever the Model says."""


def plain(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def from_field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _home() -> list[Manifest]:
    """The uid has no passwd entry in a foreign image, and the root file system is read-only."""
    return [plain("USER", "antiphon"), plain("HOME", "/tmp")]


def _authorities(model: EffectiveModel) -> list[Manifest]:
    if model.spec.ca_bundle is None:
        return []
    path = f"{CA_FOLDER}/{CA_FILE}"
    return [plain("SSL_CERT_FILE", path), plain("REQUESTS_CA_BUNDLE", path)]


def _proxies(model: EffectiveModel) -> list[Manifest]:
    """In both spellings: libraries differ in which they read."""
    proxy = model.spec.proxy
    told = {"HTTP_PROXY": proxy.http_proxy, "HTTPS_PROXY": proxy.https_proxy}
    if any(told.values()):
        told["NO_PROXY"] = ",".join(filter(None, (proxy.no_proxy, *INSIDE)))
    found = [plain(name, value) for name, value in told.items() if value]
    return [*found, *(plain(name.lower(), value) for name, value in told.items() if value)]


def worker_environment(model: EffectiveModel, context: OperatorContext) -> list[Manifest]:
    """What a worker's arguments refer to, and what its libraries read."""
    found = [
        from_field("POD_NAME", "metadata.name"),
        from_field("POD_NAMESPACE", "metadata.namespace"),
        from_field("POD_IP", "status.podIP"),
        *_home(),
    ]
    if context.otlp_endpoint:
        found += [
            plain("OTEL_EXPORTER_OTLP_ENDPOINT", context.otlp_endpoint),
            plain(
                "OTEL_RESOURCE_ATTRIBUTES",
                f"k8s.namespace.name=$(POD_NAMESPACE),k8s.pod.name=$(POD_NAME),antiphon.model={model.key}",
            ),
        ]
    return found


def fetch_environment(model: EffectiveModel) -> list[Manifest]:
    """What `antiphon fetch` reads. Only here is the hub's token."""
    found = [*_home(), *_authorities(model), *_proxies(model)]
    secret = model.spec.source.secret_ref
    if secret is not None:
        reference = {"name": secret.name, "key": secret.key}
        found.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    return found
