"""Checks of Kubernetes manifests without a cluster: schemas of two API versions, and what no pod of ours may have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import kubernetes_validate

OLDEST = "1.30"
NEWEST = kubernetes_validate.latest_version()

CUSTOM_GROUPS = ("antiphon.dev/", "monitoring.coreos.com/", "gateway.networking.k8s.io/")
"""Kinds whose schema is not Kubernetes' own. Ours are checked against their CRDs."""

Manifest = Mapping[str, Any]


def schema_problems(manifest: Manifest) -> list[str]:
    """What the API servers of the oldest and newest supported version would say, strictly; unknown fields included."""
    if str(manifest["apiVersion"]).startswith(CUSTOM_GROUPS):
        return []
    found = []
    for version in (OLDEST, NEWEST):
        try:
            kubernetes_validate.validate(dict(manifest), version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(str(part) for part in error.path)
            found.append(f"{_name(manifest)} on {version}: {path}: {error.message}")
        except kubernetes_validate.SchemaNotFoundError as error:
            found.append(f"{_name(manifest)} on {version}: {error.message}")
    return found


def assert_valid(manifests: Iterable[Manifest]) -> None:
    problems = [problem for manifest in manifests for problem in schema_problems(manifest)]
    assert not problems, "\n".join(problems)


def pod_templates_of(manifest: Manifest) -> Iterator[Manifest]:
    """The pod templates inside an object: of workloads, and those that a ControllerRevision keeps."""
    if manifest["kind"] in ("StatefulSet", "Deployment", "Job", "DaemonSet"):
        yield manifest["spec"]["template"]
    elif manifest["kind"] == "Pod":
        yield manifest
    elif manifest["kind"] == "ControllerRevision":
        for pool in manifest["data"].get("pools", {}).values():
            yield pool["template"]


def security_problems(
    template: Manifest, *, token_allowed: bool = False, may_add: frozenset[str] = frozenset()
) -> list[str]:
    """What makes a pod less than `restricted` (Pod Security Standards), and what we ask for beyond: no token, a
    read-only root, sized scratch volumes. `may_add` are capabilities that are allowed nevertheless."""
    spec = template["spec"]
    found = [f"{field} is set" for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field)]
    if not token_allowed and spec.get("automountServiceAccountToken") is not False:
        found.append("a service account token is mounted")
    pod = spec.get("securityContext", {})
    if pod.get("runAsNonRoot") is not True or not pod.get("runAsUser"):
        found.append("it may run as root")
    if pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        found.append("no seccomp profile")
    for volume in spec.get("volumes", ()):
        if "hostPath" in volume:
            found.append(f"volume {volume['name']} is a path of the node")
        if "emptyDir" in volume and not volume["emptyDir"].get("sizeLimit"):
            found.append(f"volume {volume['name']} has no size")
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        found += [f"container {container['name']}: {problem}" for problem in _container_problems(container, may_add)]
    return found


def _container_problems(container: Manifest, may_add: frozenset[str]) -> Iterator[str]:
    security = container.get("securityContext", {})
    if security.get("privileged"):
        yield "it is privileged"
    if security.get("allowPrivilegeEscalation") is not False:
        yield "it may gain privileges"
    if security.get("readOnlyRootFilesystem") is not True:
        yield "its root file system is writable"
    if security.get("runAsUser") == 0 or security.get("runAsNonRoot") is False:
        yield "it runs as root"
    capabilities = security.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"]:
        yield "it keeps capabilities"
    if not set(capabilities.get("add", ())) <= may_add:
        yield f"it adds the capabilities {capabilities['add']}"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "it takes a port of the node"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in container and "exec" in container[probe]:
            yield f"its {probe} starts a process"


def _name(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest.get('metadata', {}).get('name', '')}"
