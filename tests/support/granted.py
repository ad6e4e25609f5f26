"""What the rendered chart allows a service account, and what a request needs. As RBAC has it: rights only add up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.kube.requests import Request

CREATED = 201
CLUSTER = ""
"""In the place of a namespace: everywhere, and what belongs to none."""


@dataclass(frozen=True)
class Right:
    """One verb on one resource (`pods`, `pods/log`) of one API group."""

    verb: str
    group: str
    resource: str
    namespace: str
    """CLUSTER: in all of them."""
    names: frozenset[str] = frozenset()
    """Empty: any."""

    def covers(self, needed: Right) -> bool:
        return (
            (self.verb, self.group, self.resource) == (needed.verb, needed.group, needed.resource)
            and self.namespace in (CLUSTER, needed.namespace)
            and (not self.names or (bool(needed.names) and needed.names <= self.names))
        )


def rights_of(objects: list[dict[str, Any]], account: str) -> set[Right]:
    """All that the bindings among `objects` give to the service account of that name."""
    roles = {(one["kind"], one["metadata"]["name"]): one for one in objects if one["kind"] in ("ClusterRole", "Role")}
    found: set[Right] = set()
    for binding in objects:
        if binding["kind"] not in ("ClusterRoleBinding", "RoleBinding"):
            continue
        if not any((who["kind"], who["name"]) == ("ServiceAccount", account) for who in binding["subjects"]):
            continue
        namespace = CLUSTER if binding["kind"] == "ClusterRoleBinding" else binding["metadata"]["namespace"]
        role = roles[binding["roleRef"]["kind"], binding["roleRef"]["name"]]
        for rule in role["rules"]:
            found |= set(_rights(rule, namespace))
    return found


def _rights(rule: Mapping[str, Any], namespace: str) -> Iterator[Right]:
    for group in rule["apiGroups"]:
        for resource in rule["resources"]:
            for verb in rule["verbs"]:
                yield Right(verb, group, resource, namespace, frozenset(rule.get("resourceNames") or ()))


def needed_for(request: Request) -> list[Right]:
    """What an API server wants for it. An apply that makes the object needs the right to create it, too. When something
    is created its name does not count, so no right to some names is enough."""
    resource = f"{request.resource}/{request.subresource}" if request.subresource else request.resource
    made = request.verb == "create" or (request.verb == "patch" and request.code == CREATED)
    needed = [Right("create", request.group, resource, request.namespace)] if made else []
    if request.verb != "create":
        names = frozenset({request.name} if request.name else ())
        needed.append(Right(request.verb, request.group, resource, request.namespace, names))
    return needed
