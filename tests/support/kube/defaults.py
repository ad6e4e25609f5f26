"""What the API server adds to built-in objects by itself.

Enough to catch an operator that compares whole objects: each function fills in place what a real server would fill.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from tests.support.kube.objects import Object
from tests.support.kube.resources import (
    CRDS,
    DEPLOYMENTS,
    JOBS,
    NAMESPACES,
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    SECRETS,
    SERVICES,
    STATEFULSETS,
    Resource,
)


def fill(resource: Resource, value: Object) -> None:
    """Defaults of every write."""
    filler = _FILLERS.get(resource)
    if filler is not None:
        filler(value)


def initial_status(resource: Resource, value: Object) -> Object | None:
    """The status of a new object; None: it has none yet."""
    if resource == PODS:
        return {"phase": "Pending", "qosClass": qos_class(value["spec"])}
    if resource == NAMESPACES:
        return {"phase": "Active"}
    if resource == STATEFULSETS:
        return {"replicas": 0, "availableReplicas": 0}
    if resource == SERVICES:
        return {"loadBalancer": {}}
    if resource == PERSISTENT_VOLUME_CLAIMS:
        return {"phase": "Pending"}
    if resource == NODES:
        return value.get("status")
    return {} if resource in (DEPLOYMENTS, JOBS) else None


def qos_class(spec: Object) -> str:
    resources = [container.get("resources") or {} for container in spec.get("containers", ())]
    if not any(each.get("requests") or each.get("limits") for each in resources):
        return "BestEffort"
    for each in resources:
        limits, requests = each.get("limits") or {}, each.get("requests") or {}
        for name in ("cpu", "memory"):
            if name not in limits or requests.get(name, limits[name]) != limits[name]:
                return "Burstable"
    return "Guaranteed"


def _set(value: dict[str, Any], **defaults: Any) -> None:
    for key, default in defaults.items():
        if value.get(key) is None:
            value[key] = default


def _probe(probe: Object) -> None:
    _set(probe, timeoutSeconds=1, periodSeconds=10, successThreshold=1, failureThreshold=3)
    if "httpGet" in probe:
        _set(probe["httpGet"], path="/", scheme="HTTP")


def _container(container: Object) -> None:
    image = str(container.get("image", ""))
    latest = "@" not in image and (":" not in image.rsplit("/", 1)[-1] or image.endswith(":latest"))
    _set(
        container,
        imagePullPolicy="Always" if latest else "IfNotPresent",
        terminationMessagePath="/dev/termination-log",
        terminationMessagePolicy="File",
        resources={},
    )
    for port in container.get("ports") or ():
        _set(port, protocol="TCP")
    for variable in container.get("env") or ():
        reference = (variable.get("valueFrom") or {}).get("fieldRef")
        if reference is not None:
            _set(reference, apiVersion="v1")
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if name in container:
            _probe(container[name])
    resources = container["resources"]
    for group in ("limits", "requests"):
        if group in resources:
            resources[group] = {name: _canonical(item) for name, item in resources[group].items()}


def _canonical(quantity: Any) -> Any:
    """Numbers become texts; `1000m` becomes `1`, as quantities are written back."""
    text = str(quantity)
    if text.endswith("m") and text[:-1].isdigit() and int(text[:-1]) % 1000 == 0:
        return str(int(text[:-1]) // 1000)
    return text


def _volume(volume: Object) -> None:
    for name in ("secret", "configMap", "projected", "downwardAPI"):
        if name in volume:
            _set(volume[name], defaultMode=420)
    for source in (volume.get("projected") or {}).get("sources") or ():
        if "serviceAccountToken" in source:
            _set(source["serviceAccountToken"], expirationSeconds=3600)
    for item in (volume.get("downwardAPI") or {}).get("items") or ():
        if "fieldRef" in item:
            _set(item["fieldRef"], apiVersion="v1")
    if volume.keys() == {"name"}:
        volume["emptyDir"] = {}
    if "hostPath" in volume:
        _set(volume["hostPath"], type="")


def pod_spec(spec: Object, *, restart: str = "Always") -> None:
    _set(
        spec,
        restartPolicy=restart,
        terminationGracePeriodSeconds=30,
        dnsPolicy="ClusterFirst",
        securityContext={},
        schedulerName="default-scheduler",
    )
    if spec.get("serviceAccountName"):
        spec["serviceAccount"] = spec["serviceAccountName"]
    elif spec.get("serviceAccount"):
        spec["serviceAccountName"] = spec["serviceAccount"]
    for container in [*spec.get("containers", ()), *(spec.get("initContainers") or ())]:
        _container(container)
    for volume in spec.get("volumes") or ():
        _volume(volume)


def _template(spec: Object) -> None:
    """The pod template of a workload."""
    template = spec.setdefault("template", {})
    metadata = template.setdefault("metadata", {})
    metadata.setdefault("creationTimestamp", None)
    pod_spec(template.setdefault("spec", {}))


def _stateful_set(value: Object) -> None:
    spec = value.setdefault("spec", {})
    _set(
        spec,
        replicas=1,
        podManagementPolicy="OrderedReady",
        revisionHistoryLimit=10,
        updateStrategy={"type": "RollingUpdate"},
        persistentVolumeClaimRetentionPolicy={"whenDeleted": "Retain", "whenScaled": "Retain"},
    )
    if spec["updateStrategy"].get("type") == "RollingUpdate":
        _set(spec["updateStrategy"], rollingUpdate={"partition": 0})
    _template(spec)


def _deployment(value: Object) -> None:
    spec = value.setdefault("spec", {})
    _set(spec, replicas=1, revisionHistoryLimit=10, progressDeadlineSeconds=600, strategy={"type": "RollingUpdate"})
    if spec["strategy"].get("type") == "RollingUpdate":
        _set(spec["strategy"], rollingUpdate={"maxUnavailable": "25%", "maxSurge": "25%"})
    _template(spec)


def _job(value: Object) -> None:
    spec = value.setdefault("spec", {})
    _set(
        spec,
        parallelism=1,
        completions=1,
        backoffLimit=6,
        completionMode="NonIndexed",
        suspend=False,
        manualSelector=False,
        podReplacementPolicy="TerminatingOrFailed",
    )
    if not spec["manualSelector"]:
        spec.pop("manualSelector")
    uid, name = value["metadata"].get("uid", ""), value["metadata"].get("name", "")
    labels = {
        "batch.kubernetes.io/controller-uid": uid,
        "batch.kubernetes.io/job-name": name,
        "controller-uid": uid,
        "job-name": name,
    }
    spec.setdefault("selector", {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}})
    _template(spec)
    metadata = spec["template"]["metadata"]
    metadata["labels"] = labels | (metadata.get("labels") or {})


_next_address = iter(f"10.96.{i // 250}.{i % 250 + 2}" for i in range(60_000))


def _service(value: Object) -> None:
    spec = value.setdefault("spec", {})
    _set(spec, type="ClusterIP", sessionAffinity="None", internalTrafficPolicy="Cluster")
    if spec["type"] != "ExternalName":
        if not spec.get("clusterIP"):
            spec["clusterIP"] = next(_next_address)
        _set(spec, clusterIPs=[spec["clusterIP"]], ipFamilies=["IPv4"], ipFamilyPolicy="SingleStack")
    for port in spec.get("ports") or ():
        _set(port, protocol="TCP", targetPort=port.get("port"))


def _pod(value: Object) -> None:
    spec = value.setdefault("spec", {})
    for container in [*spec.get("containers", ()), *(spec.get("initContainers") or ())]:
        resources = container.get("resources") or {}
        for name, quantity in (resources.get("limits") or {}).items():
            _set(resources.setdefault("requests", {}), **{name: quantity})
    pod_spec(spec)
    _set(spec, enableServiceLinks=True, preemptionPolicy="PreemptLowerPriority", priority=0)


def _secret(value: Object) -> None:
    texts = value.pop("stringData", None) or {}
    if texts:
        encoded = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
        value["data"] = (value.get("data") or {}) | encoded
    _set(value, type="Opaque")


def _namespace(value: Object) -> None:
    _set(value.setdefault("spec", {}), finalizers=["kubernetes"])
    name = value["metadata"].get("name")
    value["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = name


def _claim(value: Object) -> None:
    _set(value.setdefault("spec", {}), volumeMode="Filesystem")


def _crd(value: Object) -> None:
    spec = value["spec"]
    names = spec["names"]
    _set(names, singular=names["kind"].lower(), listKind=f"{names['kind']}List")
    _set(spec, conversion={"strategy": "None"})


_FILLERS: dict[Resource, Callable[[Object], None]] = {
    PODS: _pod,
    STATEFULSETS: _stateful_set,
    DEPLOYMENTS: _deployment,
    JOBS: _job,
    SERVICES: _service,
    SECRETS: _secret,
    NAMESPACES: _namespace,
    PERSISTENT_VOLUME_CLAIMS: _claim,
    CRDS: _crd,
}
