"""Kinds of the API and where each lies in it. Only what the operator touches; nothing is discovered at run time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from antiphon_operator.names import API_VERSION

Object = Mapping[str, Any]
"""A Kubernetes object as parsed JSON. Never changed."""


class UnknownKindError(LookupError):
    """A kind that this module does not list."""


@dataclass(frozen=True, slots=True)
class Resource:
    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Below the server's address. No name: the collection. No namespace: of the whole cluster."""
        parts = ["/apis" if "/" in self.api_version else "/api", self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name:
            parts.append(quote(name, safe=""))
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


MODELS = Resource(API_VERSION, "Model", "models")
POOLS = Resource(API_VERSION, "Pool", "pools")
PODS = Resource("v1", "Pod", "pods")
NODES = Resource("v1", "Node", "nodes", namespaced=False)
NAMESPACES = Resource("v1", "Namespace", "namespaces", namespaced=False)
EVENTS = Resource("v1", "Event", "events")
SERVICES = Resource("v1", "Service", "services")
SERVICE_ACCOUNTS = Resource("v1", "ServiceAccount", "serviceaccounts")
CONFIG_MAPS = Resource("v1", "ConfigMap", "configmaps")
SECRETS = Resource("v1", "Secret", "secrets")
PERSISTENT_VOLUME_CLAIMS = Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
STATEFUL_SETS = Resource("apps/v1", "StatefulSet", "statefulsets")
CONTROLLER_REVISIONS = Resource("apps/v1", "ControllerRevision", "controllerrevisions")
JOBS = Resource("batch/v1", "Job", "jobs")
POD_DISRUPTION_BUDGETS = Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICIES = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
LEASES = Resource("coordination.k8s.io/v1", "Lease", "leases")
POD_MONITORS = Resource("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")

ALL = (
    MODELS,
    POOLS,
    PODS,
    NODES,
    NAMESPACES,
    EVENTS,
    SERVICES,
    SERVICE_ACCOUNTS,
    CONFIG_MAPS,
    SECRETS,
    PERSISTENT_VOLUME_CLAIMS,
    STATEFUL_SETS,
    CONTROLLER_REVISIONS,
    JOBS,
    POD_DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
    LEASES,
    POD_MONITORS,
)
_BY_KIND = {(resource.api_version, resource.kind): resource for resource in ALL}


def resource_of(api_version: str, kind: str) -> Resource:
    """Raises UnknownKindError."""
    try:
        return _BY_KIND[api_version, kind]
    except KeyError:
        raise UnknownKindError(
            f"{api_version} {kind} is no kind that the operator touches: list it in kube.resources"
        ) from None
