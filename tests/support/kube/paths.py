"""Paths of the API: `/apis/apps/v1/namespaces/chat/statefulsets/x/scale` becomes a Target."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.kube.errors import no_such_path
from tests.support.kube.registry import Registry
from tests.support.kube.resources import NAMESPACES, Resource


@dataclass(frozen=True)
class Target:
    resource: Resource
    namespace: str | None
    name: str = ""
    subresource: str = ""


def target_of(registry: Registry, path: str) -> Target:
    """Raises 404 where nothing is served at the path."""
    parts = [part for part in path.split("/") if part]
    if len(parts) >= 3 and parts[0] == "api":
        group, version, rest = "", parts[1], parts[2:]
    elif len(parts) >= 4 and parts[0] == "apis":
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        raise no_such_path()
    namespace: str | None = None
    if rest[0] == "namespaces" and len(rest) >= 3:
        inside = registry.at(group, version, rest[2])
        if inside is not None and inside.namespaced:
            namespace, rest = rest[1], rest[2:]
    resource = registry.at(group, version, rest[0])
    if resource is None or len(rest) > 3 or (namespace is not None and resource == NAMESPACES):
        raise no_such_path()
    name, subresource = [*rest[1:], "", ""][:2]
    if resource.namespaced and name and namespace is None:
        raise no_such_path()
    return Target(resource, namespace, name, subresource)
