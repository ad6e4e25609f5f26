"""`/scale`, `/eviction`, `/binding` and `/log`."""

from __future__ import annotations

from typing import Any

from tests.support.kube.api import Api
from tests.support.kube.errors import ApiError, Cause, bad_request, conflict, not_found
from tests.support.kube.objects import Object, clone, timestamp
from tests.support.kube.patches import json_patched, merge_patched
from tests.support.kube.registry import Known, ScalePaths
from tests.support.kube.resources import POD_DISRUPTION_BUDGETS, PODS, Resource
from tests.support.kube.selectors import matches


def _at(value: Object, path: tuple[str, ...]) -> Any:
    here: Any = value
    for step in path:
        here = here.get(step) if isinstance(here, dict) else None
    return here


def _nested(path: tuple[str, ...], value: Any) -> Object:
    for step in reversed(path):
        value = {step: value}
    return value  # type: ignore[no-any-return]


def _scale_paths(known: Known) -> ScalePaths:
    if known.scale is None:
        raise not_found(known.resource, "scale")
    return known.scale


def scale_of(known: Known, value: Object) -> Object:
    """The Scale of an object."""
    paths = _scale_paths(known)
    metadata = value["metadata"]
    if paths.selector:
        selector = _at(value, paths.selector) or ""
    else:
        labels = (_at(value, ("spec", "selector", "matchLabels")) or {}).items()
        selector = ",".join(f"{key}={item}" for key, item in sorted(labels))
    status: Object = {"replicas": _at(value, paths.status_replicas) or 0}
    if selector:
        status["selector"] = selector
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    replicas = _at(value, paths.replicas)
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: metadata[key] for key in kept if key in metadata},
        "spec": {} if replicas is None else {"replicas": replicas},
        "status": status,
    }


def write_scale(
    api: Api, resource: Resource, namespace: str | None, name: str, scale: Object, *, manager: str, dry_run: bool
) -> Object:
    known = api.known(resource)
    paths = _scale_paths(known)
    replicas = (scale.get("spec") or {}).get("replicas", 0)
    if not isinstance(replicas, int) or isinstance(replicas, bool):
        raise bad_request(f"spec.replicas: a number is needed, not {replicas!r}")
    if replicas < 0:
        why = f"Invalid value: {replicas}: must be greater than or equal to 0"
        raise ApiError(
            422,
            "Invalid",
            f'Scale.autoscaling "{name}" is invalid: spec.replicas: {why}',
            causes=(Cause("FieldValueInvalid", why, "spec.replicas"),),
        )
    patch: Object = _nested(paths.replicas, replicas)
    metadata = {key: item for key, item in (scale.get("metadata") or {}).items() if key in ("uid", "resourceVersion")}
    live = api.peek(resource, namespace, name)["metadata"]
    if metadata.get("resourceVersion", live["resourceVersion"]) != live["resourceVersion"]:
        raise conflict(resource, name)
    new = api.merge_patch(resource, namespace, name, patch, subresource="scale", manager=manager, dry_run=dry_run)
    return scale_of(known, new)


def patched_scale(api: Api, resource: Resource, namespace: str | None, name: str, content: str, patch: Any) -> Object:
    """What a merge or JSON patch makes of the current Scale."""
    current = clone(scale_of(api.known(resource), api.peek(resource, namespace, name)))
    if not (isinstance(patch, dict) and (patch.get("metadata") or {}).get("resourceVersion")):
        current["metadata"].pop("resourceVersion")
    patched: Object = json_patched(current, patch) if "json-patch" in content else merge_patched(current, patch)
    return patched


def apply_scale(
    api: Api, resource: Resource, namespace: str | None, name: str, scale: Object, *, manager: str, force: bool
) -> Object:
    """Server-side apply of a Scale: the manager owns the replicas, and nothing else."""
    known = api.known(resource)
    stated = (scale.get("spec") or {}).get("replicas")
    wanted: Object = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"name": name}}
    if stated is not None:
        wanted |= _nested(_scale_paths(known).replicas, stated)
    new = api.apply(resource, namespace, name, wanted, manager=manager, force=force, subresource="scale")
    return scale_of(known, new)


def evict(api: Api, namespace: str, name: str, eviction: Object) -> None:
    """Deletes the pod unless a PodDisruptionBudget forbids: then 429. Counts by what the budget's status says."""
    pod = api.peek(PODS, namespace, name)
    options = eviction.get("deleteOptions") or {}
    status = pod.get("status") or {}
    if status.get("phase") not in ("Pending", "Succeeded", "Failed") and "deletionTimestamp" not in pod["metadata"]:
        _ask_budgets(api, pod)
    preconditions = options.get("preconditions") or {}
    api.delete(PODS, namespace, name, grace_s=options.get("gracePeriodSeconds"), uid=preconditions.get("uid", ""))


def _ask_budgets(api: Api, pod: Object) -> None:
    namespace, labels = pod["metadata"]["namespace"], pod["metadata"].get("labels") or {}
    budgets = [
        budget
        for budget in api.select(POD_DISRUPTION_BUDGETS, namespace)
        if matches(budget["spec"].get("selector"), labels)
    ]
    if len(budgets) > 1:
        why = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        raise ApiError(500, "InternalError", why)
    for budget in budgets:
        name, status = budget["metadata"]["name"], budget.get("status") or {}
        ready = any(
            each["type"] == "Ready" and each["status"] == "True"
            for each in (pod.get("status") or {}).get("conditions") or ()
        )
        healthy, desired = status.get("currentHealthy", 0), status.get("desiredHealthy", 0)
        always = budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow"
        if not ready and (always or (healthy >= desired > 0)):
            continue
        if status.get("observedGeneration", 0) < budget["metadata"]["generation"]:
            raise _refused(name, f"The disruption budget {name} is still being processed by the server.")
        allowed = status.get("disruptionsAllowed", 0)
        if allowed < 1:
            raise _refused(
                name, f"The disruption budget {name} needs {desired} healthy pods and has {healthy} currently"
            )
        taken = {pod["metadata"]["name"]: timestamp()}
        api.merge_patch(
            POD_DISRUPTION_BUDGETS,
            namespace,
            name,
            {"status": {"disruptionsAllowed": allowed - 1, "disruptedPods": taken}},
            subresource="status",
        )


def _refused(budget: str, why: str) -> ApiError:
    return ApiError(
        429,
        "TooManyRequests",
        "Cannot evict pod as it would violate the pod's disruption budget.",
        causes=(Cause("DisruptionBudget", why),),
    )


def bind(api: Api, namespace: str, name: str, binding: Object) -> None:
    """The scheduler's word: the pod runs on that node."""
    node = (binding.get("target") or {}).get("name")
    if not node:
        raise bad_request("a Binding names its node as target.name")
    pod = api.peek(PODS, namespace, name)
    if pod["spec"].get("nodeName"):
        raise conflict(PODS, name, f"pod {name} is already assigned to node {pod['spec']['nodeName']!r}")
    api.merge_patch(PODS, namespace, name, {"spec": {"nodeName": node}}, manager="kube-scheduler")
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp()}
    others = [each for each in (pod.get("status") or {}).get("conditions") or () if each["type"] != "PodScheduled"]
    conditions = {"status": {"conditions": [*others, scheduled]}}
    api.merge_patch(PODS, namespace, name, conditions, subresource="status", manager="kube-scheduler")


def log(
    api: Api, namespace: str, name: str, container: str, *, previous: bool, tail: int | None, most: int | None
) -> str:
    """A container's log, as the Api's `pod_log` gives it. Raises 400 where there is none."""
    pod = api.peek(PODS, namespace, name)
    containers = [each["name"] for each in [*pod["spec"]["containers"], *(pod["spec"].get("initContainers") or ())]]
    if not container:
        if len(pod["spec"]["containers"]) > 1:
            listed = " ".join(each["name"] for each in pod["spec"]["containers"])
            raise bad_request(f"a container name must be specified for pod {name}, choose one of: [{listed}]")
        container = containers[0]
    if container not in containers:
        raise bad_request(f"container {container} is not valid for pod {name}")
    text = api.pod_log(clone(pod), container, previous)
    if text is None:
        if previous:
            raise bad_request(f'previous terminated container "{container}" in pod "{name}" not found')
        raise bad_request(f'container "{container}" in pod "{name}" is waiting to start: ContainerCreating')
    if tail is not None:
        lines = text.splitlines(keepends=True)
        text = "".join(lines[len(lines) - tail :] if tail < len(lines) else lines) if tail else ""
    return text if most is None else text[:most]
