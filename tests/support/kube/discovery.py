"""What the server says of itself: its version, its groups, its resources and what each can do."""

from __future__ import annotations

from typing import Any

from tests.support.kube.errors import no_such_path
from tests.support.kube.registry import Known, Registry
from tests.support.kube.resources import JOBS, PODS, Resource

VERSION = {
    "major": "1",
    "minor": "30",
    "gitVersion": "v1.30.0",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "2024-04-17T17:27:03Z",
    "goVersion": "go1.22.2",
    "compiler": "gc",
    "platform": "linux/amd64",
}
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_POD_PARTS = {
    "log": ("Pod", "", ["get"]),
    "eviction": ("Eviction", "policy/v1", ["create"]),
    "binding": ("Binding", "", ["create"]),
}


def document(registry: Registry, path: str) -> dict[str, Any] | None:
    """The discovery document at a path; None where the path is not one of discovery's. Raises 404 for no such group."""
    match [part for part in path.split("/") if part]:
        case ["version"]:
            return dict(VERSION)
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups(registry)}
        case ["api", "v1"]:
            return _resources(registry, "", "v1")
        case ["apis", name]:
            for group in _groups(registry):
                if group["name"] == name:
                    return {"kind": "APIGroup", "apiVersion": "v1"} | group
            raise no_such_path()
        case ["apis", group, version]:
            return _resources(registry, group, version)
    return None


def _groups(registry: Registry) -> list[dict[str, Any]]:
    versions: dict[str, list[str]] = {}
    for known in registry.all():
        resource = known.resource
        if resource.group and resource.version not in versions.setdefault(resource.group, []):
            versions[resource.group].append(resource.version)
    return [
        {
            "name": group,
            "versions": [{"groupVersion": f"{group}/{version}", "version": version} for version in found],
            "preferredVersion": {"groupVersion": f"{group}/{found[0]}", "version": found[0]},
        }
        for group, found in versions.items()
    ]


def _resources(registry: Registry, group: str, version: str) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    for known in registry.all():
        if (known.resource.group, known.resource.version) == (group, version):
            entries += _entries(known)
    if not entries:
        raise no_such_path()
    api_version = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": entries}


def _entries(known: Known) -> list[dict[str, Any]]:
    resource, traits = known.resource, known.traits
    main: dict[str, Any] = {
        "name": resource.plural,
        "singularName": traits.singular or resource.kind.lower(),
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": _VERBS,
    }
    if traits.short_names:
        main["shortNames"] = list(traits.short_names)
    if traits.categories:
        main["categories"] = list(traits.categories)
    entries = [main]
    if traits.status:
        entries.append(_part(resource, "status", resource.kind, "", ["get", "patch", "update"]))
    if traits.scale:
        entries.append(_part(resource, "scale", "Scale", "autoscaling/v1", ["get", "patch", "update"]))
    if resource == PODS:
        entries += [_part(resource, name, *rest) for name, rest in _POD_PARTS.items()]
    return entries


def _part(resource: Resource, name: str, kind: str, api_version: str, verbs: list[str]) -> dict[str, Any]:
    group, _, version = api_version.rpartition("/")
    where = {"group": group, "version": version} if api_version else {}
    return {
        "name": f"{resource.plural}/{name}",
        "singularName": "",
        "namespaced": resource.namespaced,
        "kind": kind,
        "verbs": verbs,
    } | where


ORPHANS_BY_DEFAULT = frozenset({JOBS})
"""Deleted without a propagationPolicy, these leave their children behind: an old promise of batch/v1."""
