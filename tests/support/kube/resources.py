"""The built-in resources that the double serves, with what discovery says of each.

A resource is its place in the API (group, version, plural). Custom resources are added by their
CustomResourceDefinition while the double runs; these here are always there.
"""

from __future__ import annotations

from typing import NamedTuple


class Resource(NamedTuple):
    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """`statefulsets.apps`: how error messages name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


PODS = Resource("", "v1", "pods", "Pod", True)
NODES = Resource("", "v1", "nodes", "Node", False)
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", False)
EVENTS = Resource("", "v1", "events", "Event", True)
SERVICES = Resource("", "v1", "services", "Service", True)
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount", True)
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap", True)
SECRETS = Resource("", "v1", "secrets", "Secret", True)
PERSISTENT_VOLUME_CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", True)
RESOURCE_QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota", True)
ENDPOINTS = Resource("", "v1", "endpoints", "Endpoints", True)
STATEFULSETS = Resource("apps", "v1", "statefulsets", "StatefulSet", True)
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment", True)
REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet", True)
CONTROLLER_REVISIONS = Resource("apps", "v1", "controllerrevisions", "ControllerRevision", True)
JOBS = Resource("batch", "v1", "jobs", "Job", True)
POD_DISRUPTION_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", True)
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", True)
INGRESSES = Resource("networking.k8s.io", "v1", "ingresses", "Ingress", True)
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease", True)
HORIZONTAL_POD_AUTOSCALERS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler", True)
PRIORITY_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", False)
STORAGE_CLASSES = Resource("storage.k8s.io", "v1", "storageclasses", "StorageClass", False)
CLUSTER_ROLES = Resource("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", False)
CLUSTER_ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding", False)
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role", True)
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding", True)
CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False)
POD_MONITORS = Resource("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor", True)
"""Not built in: served once its CustomResourceDefinition is installed."""


class Traits(NamedTuple):
    """What a resource can do beside plain CRUD."""

    status: bool = False
    scale: bool = False
    generation: bool = False
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    singular: str = ""


BUILT_IN: dict[Resource, Traits] = {
    PODS: Traits(status=True, short_names=("po",), categories=("all",)),
    NODES: Traits(status=True, short_names=("no",)),
    NAMESPACES: Traits(status=True, short_names=("ns",)),
    EVENTS: Traits(short_names=("ev",)),
    SERVICES: Traits(status=True, short_names=("svc",), categories=("all",)),
    SERVICE_ACCOUNTS: Traits(short_names=("sa",)),
    CONFIG_MAPS: Traits(short_names=("cm",)),
    SECRETS: Traits(),
    PERSISTENT_VOLUME_CLAIMS: Traits(status=True, short_names=("pvc",)),
    RESOURCE_QUOTAS: Traits(status=True, short_names=("quota",)),
    ENDPOINTS: Traits(short_names=("ep",)),
    STATEFULSETS: Traits(status=True, scale=True, generation=True, short_names=("sts",), categories=("all",)),
    DEPLOYMENTS: Traits(status=True, scale=True, generation=True, short_names=("deploy",), categories=("all",)),
    REPLICA_SETS: Traits(status=True, scale=True, generation=True, short_names=("rs",), categories=("all",)),
    CONTROLLER_REVISIONS: Traits(),
    JOBS: Traits(status=True, generation=True, categories=("all",)),
    POD_DISRUPTION_BUDGETS: Traits(status=True, generation=True, short_names=("pdb",)),
    NETWORK_POLICIES: Traits(generation=True, short_names=("netpol",)),
    INGRESSES: Traits(status=True, generation=True, short_names=("ing",)),
    LEASES: Traits(),
    HORIZONTAL_POD_AUTOSCALERS: Traits(status=True, short_names=("hpa",), categories=("all",)),
    PRIORITY_CLASSES: Traits(generation=True, short_names=("pc",)),
    STORAGE_CLASSES: Traits(short_names=("sc",)),
    CLUSTER_ROLES: Traits(),
    CLUSTER_ROLE_BINDINGS: Traits(),
    ROLES: Traits(),
    ROLE_BINDINGS: Traits(),
    CRDS: Traits(status=True, generation=True, short_names=("crd", "crds"), categories=("api-extensions",)),
}
