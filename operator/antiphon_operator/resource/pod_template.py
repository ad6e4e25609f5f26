"""What a `podTemplate` may say: everything but what a typed field says or what the operator lives by.

It is merged into the rendered pods: containers, init containers, volumes and env by name, volume mounts by path; any
other field replaces the rendered one. It is an unstructured field, so CEL cannot look into it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from antiphon_operator.names import (
    COMPONENT_LABEL,
    GROUP,
    GRPC_PORT,
    MANAGED_BY_LABEL,
    NAME_LABEL,
    RAY_PORT,
    STATUS_PORT,
)
from antiphon_operator.resource.effective import EffectiveModel, EffectivePool
from antiphon_operator.resource.problems import Problem
from antiphon_operator.resource.reasons import Reason
from antiphon_operator.resource.worker_flags import instead_of_variable

MAX_BYTES = 64 * 1024
"""Of JSON: it is kept in every revision and rendered into every replica."""

WORKER_CONTAINER = "worker"
OWNED_INIT_CONTAINERS = frozenset({"fetch"})
OWNED_VOLUMES = frozenset({"weights", "redis", "ray", "ca"})
"""The other rendered volumes, `shm` and `tmp`, may be replaced by larger ones."""
OWNED_PATHS = ("/etc/antiphon", "/models")
_PORTS = frozenset({GRPC_PORT, STATUS_PORT, RAY_PORT})
_LABELS = frozenset({NAME_LABEL, COMPONENT_LABEL, MANAGED_BY_LABEL})

_OPERATOR = "remove it, the operator decides it"
_POD_FIELDS: Mapping[str, str] = {
    "serviceAccountName": "write spec.serviceAccountName instead",
    "serviceAccount": "write spec.serviceAccountName instead",
    "imagePullSecrets": "write spec.imagePullSecrets instead",
    "automountServiceAccountToken": "remove it, pods of a Model never get a token",
    "terminationGracePeriodSeconds": _OPERATOR,
    "restartPolicy": _OPERATOR,
    "enableServiceLinks": _OPERATOR,
    "hostname": _OPERATOR,
    "subdomain": _OPERATOR,
    "setHostnameAsFQDN": _OPERATOR,
    "nodeName": "write nodeSelector or affinity, so that the scheduler still places the pods",
    "hostNetwork": "remove it, two pods on one node would want the same ports; networks go into "
    "spec.kvCache.transfer.rdma.networks",
    "ephemeralContainers": "remove it, kubectl debug adds them to running pods",
}
_WORKER_FIELDS: Mapping[str, str] = {
    "image": "write spec.engine.image instead",
    "command": _OPERATOR,
    "args": "write spec.engine.args instead",
    "ports": _OPERATOR,
    "livenessProbe": _OPERATOR,
    "readinessProbe": _OPERATOR,
    "startupProbe": _OPERATOR,
    "lifecycle": _OPERATOR,
    "terminationMessagePath": _OPERATOR,
    "terminationMessagePolicy": _OPERATOR,
    "resources": "write resources of the pool instead",
}


def pod_template_problems(model: EffectiveModel, pool: EffectivePool) -> Iterator[Problem]:
    """All that is wrong with the pool's `podTemplate`."""
    template = pool.spec.pod_template
    path = f"spec.{pool.role}.podTemplate"
    size = len(json.dumps(template))
    if size > MAX_BYTES:
        yield _problem(path, f"it has {size} bytes, at most {MAX_BYTES} are kept: move files into a ConfigMap")
        return
    for key in template:
        if key not in ("metadata", "spec"):
            yield _problem(
                f"{path}.{key}", f"a pod template has metadata and spec only: for {key}, look at spec.{pool.role}"
            )
    yield from _metadata(template.get("metadata", {}), f"{path}.metadata", model)
    yield from _pod(template.get("spec", {}), f"{path}.spec", model)


def _metadata(metadata: Any, path: str, model: EffectiveModel) -> Iterator[Problem]:
    if not isinstance(metadata, dict):
        yield _problem(path, "write an object with labels and annotations")
        return
    for key, entries in metadata.items():
        where = f"{path}.{key}"
        if key not in ("labels", "annotations"):
            yield _problem(where, "only labels and annotations of pods are yours: remove it")
        elif not isinstance(entries, dict) or not all(isinstance(value, str) for value in entries.values()):
            yield _problem(where, "write an object of texts; quote numbers and true or false")
        else:
            for name in entries:
                if name.startswith(f"{GROUP}/") or name in _LABELS:
                    yield _problem(where, f"{name} is set by the operator: remove it")
                if name == "k8s.v1.cni.cncf.io/networks" and model.spec.kv_cache.transfer.rdma.networks:
                    yield _problem(where, f"{name}: spec.kvCache.transfer.rdma.networks says it already, remove one")


def _pod(pod: Any, path: str, model: EffectiveModel) -> Iterator[Problem]:
    if not isinstance(pod, dict):
        yield _problem(path, "write an object, the spec of a pod")
        return
    yield from _refused(pod, path, _POD_FIELDS)
    if "affinity" in pod and model.spec.placement.same_topology:
        yield _problem(
            f"{path}.affinity", "it would replace what spec.placement.sameTopology makes: remove one of them"
        )
    yield from _named(pod.get("containers", []), f"{path}.containers", _container)
    yield from _named(pod.get("initContainers", []), f"{path}.initContainers", _init_container)
    yield from _named(pod.get("volumes", []), f"{path}.volumes", _volume)


def _container(container: dict[str, Any], path: str) -> Iterator[Problem]:
    if container["name"] == WORKER_CONTAINER:
        yield from _refused(container, path, _WORKER_FIELDS)
        yield from _named(container.get("env", []), f"{path}.env", _variable)
        yield from _mounts(container.get("volumeMounts", []), f"{path}.volumeMounts")
    else:
        yield from _side_container(container, path)


def _init_container(container: dict[str, Any], path: str) -> Iterator[Problem]:
    if container["name"] in OWNED_INIT_CONTAINERS:
        yield _problem(path, f"{container['name']} is the operator's container: give yours another name")
    else:
        yield from _side_container(container, path)


def _side_container(container: dict[str, Any], path: str) -> Iterator[Problem]:
    if not container.get("image"):
        yield _problem(path, f"{container['name']} needs an image; the worker's container is called worker")
    ports = container.get("ports") or []
    for port in ports if isinstance(ports, list) else []:
        number = port.get("containerPort") if isinstance(port, dict) else None
        if number in _PORTS:
            yield _problem(f"{path}.ports", f"port {number} is the worker's, and containers share them: use another")


def _volume(volume: dict[str, Any], path: str) -> Iterator[Problem]:
    if volume["name"] in OWNED_VOLUMES:
        yield _problem(path, f"{volume['name']} is the operator's volume: give yours another name")
    elif len(volume) == 1:
        yield _problem(path, f"{volume['name']} needs a source, such as emptyDir: {{}}")


def _variable(variable: dict[str, Any], path: str) -> Iterator[Problem]:
    instead = instead_of_variable(variable["name"])
    if instead is not None:
        yield _problem(path, f"{variable['name']} may not be set here: {instead}")


def _mounts(mounts: Any, path: str) -> Iterator[Problem]:
    if not _objects(mounts):
        yield _problem(path, "write a list of objects with name and mountPath")
        return
    seen: set[str] = set()
    for index, mount in enumerate(mounts):
        where, target = f"{path}[{index}]", mount.get("mountPath")
        if not isinstance(target, str) or not isinstance(mount.get("name"), str):
            yield _problem(where, "write name (of a volume) and mountPath")
        elif target in seen:
            yield _problem(where, f"{target} is there twice: remove one")
        elif any(f"{target}/".startswith(f"{owned}/") for owned in OWNED_PATHS):
            yield _problem(where, f"{target} is where the operator mounts: choose another path")
        else:
            seen.add(target)


def _named(items: Any, path: str, check: Callable[[dict[str, Any], str], Iterator[Problem]]) -> Iterator[Problem]:
    """A list that is merged by name: each has one, and none twice."""
    if not _objects(items):
        yield _problem(path, "write a list of objects with a name each")
        return
    seen: set[str] = set()
    for index, item in enumerate(items):
        where, name = f"{path}[{index}]", item.get("name")
        if not isinstance(name, str) or not name:
            yield _problem(where, "write a name: lists are merged by it")
        elif name in seen:
            yield _problem(where, f"{name} is there twice: remove one")
        else:
            seen.add(name)
            yield from check(item, where)


def _objects(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, dict) for item in items)


def _refused(given: Mapping[str, Any], path: str, fields: Mapping[str, str]) -> Iterator[Problem]:
    for key in given:
        if key in fields:
            yield _problem(f"{path}.{key}", f"{key} may not be set here: {fields[key]}")


def _problem(path: str, message: str) -> Problem:
    return Problem(path, Reason.SPEC_REFUSED, message)
