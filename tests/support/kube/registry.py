"""Which resources the server knows: the built-in ones, and those that CustomResourceDefinitions add.

One version of a custom resource is served: the one that is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.support.kube.errors import Cause, invalid
from tests.support.kube.objects import Object, timestamp
from tests.support.kube.resources import BUILT_IN, CRDS, LEASES, POD_DISRUPTION_BUDGETS, Resource, Traits
from tests.support.kube.schema import Schema, built_in_schema, custom_schema

_VERSION_NEEDED = (LEASES, POD_DISRUPTION_BUDGETS, CRDS)


@dataclass(frozen=True)
class ScalePaths:
    replicas: tuple[str, ...]
    status_replicas: tuple[str, ...]
    selector: tuple[str, ...]


_BUILT_IN_SCALE = ScalePaths(("spec", "replicas"), ("status", "replicas"), ())


@dataclass(frozen=True)
class Known:
    resource: Resource
    traits: Traits
    schema: Schema
    custom: bool = False
    open_api: dict[str, Any] = field(default_factory=dict)
    columns: tuple[dict[str, Any], ...] = ()
    scale: ScalePaths | None = None
    selectable: frozenset[str] = frozenset()
    needs_version: bool = False
    """Whether a PUT has to say which version it replaces."""


class Registry:
    def __init__(self) -> None:
        self._known: dict[Resource, Known] = {}
        self._by_path: dict[tuple[str, str, str], Resource] = {}
        for resource, traits in BUILT_IN.items():
            self._add(
                Known(
                    resource,
                    traits,
                    built_in_schema(resource),
                    scale=_BUILT_IN_SCALE if traits.scale else None,
                    needs_version=resource in _VERSION_NEEDED,
                )
            )

    def _add(self, known: Known) -> None:
        self._known[known.resource] = known
        self._by_path[known.resource[:3]] = known.resource

    def get(self, resource: Resource) -> Known | None:
        return self._known.get(resource)

    def at(self, group: str, version: str, plural: str) -> Resource | None:
        return self._by_path.get((group, version, plural))

    def of_kind(self, api_version: str, kind: str) -> Resource | None:
        return next((r for r in self._known if r.kind == kind and r.api_version == api_version), None)

    def all(self) -> list[Known]:
        return list(self._known.values())

    def install(self, crd: Object) -> Resource:
        resource, version = resource_of_crd(crd)
        spec = crd["spec"]
        names = spec["names"]
        open_api = (version.get("schema") or {}).get("openAPIV3Schema") or {}
        subresources = version.get("subresources") or {}
        scale = subresources.get("scale")
        self._add(
            Known(
                resource,
                Traits(
                    status="status" in subresources,
                    scale=scale is not None,
                    generation=True,
                    short_names=tuple(names.get("shortNames") or ()),
                    categories=tuple(names.get("categories") or ()),
                    singular=names.get("singular", ""),
                ),
                custom_schema(open_api),
                custom=True,
                open_api=open_api,
                columns=tuple(version.get("additionalPrinterColumns") or ()),
                scale=_scale_paths(scale) if scale else None,
                selectable=frozenset(each["jsonPath"][1:] for each in version.get("selectableFields") or ()),
                needs_version=True,
            )
        )
        return resource

    def uninstall(self, crd: Object) -> Resource:
        resource, _ = resource_of_crd(crd)
        self._known.pop(resource, None)
        self._by_path.pop(resource[:3], None)
        return resource


def _scale_paths(scale: dict[str, str]) -> ScalePaths:
    def steps(path: str) -> tuple[str, ...]:
        return tuple(step for step in path.split(".") if step)

    return ScalePaths(
        steps(scale["specReplicasPath"]), steps(scale["statusReplicasPath"]), steps(scale.get("labelSelectorPath", ""))
    )


def resource_of_crd(crd: Object) -> tuple[Resource, dict[str, Any]]:
    spec = crd["spec"]
    version = next(each for each in spec["versions"] if each.get("storage"))
    names = spec["names"]
    return Resource(
        spec["group"], version["name"], names["plural"], names["kind"], spec["scope"] == "Namespaced"
    ), version


def check_crd(crd: Object) -> None:
    """What a server refuses at once. (The cost of its CEL rules is not computed.)"""
    spec, name = crd.get("spec") or {}, crd["metadata"].get("name", "")
    causes: list[Cause] = []
    plural, group = (spec.get("names") or {}).get("plural", ""), spec.get("group", "")
    if name != f"{plural}.{group}":
        why = f'Invalid value: "{name}": must be spec.names.plural+"."+spec.group'
        causes.append(Cause("FieldValueInvalid", why, "metadata.name"))
    versions = spec.get("versions") or []
    if sum(bool(each.get("storage")) for each in versions) != 1:
        why = "Invalid value: must have exactly one version marked as storage version"
        causes.append(Cause("FieldValueInvalid", why, "spec.versions"))
    for place, version in enumerate(versions):
        where = f"spec.versions[{place}].schema.openAPIV3Schema"
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if not schema:
            causes.append(Cause("FieldValueRequired", "Required value: schemas are required", where))
        else:
            _check_structural(schema, where, causes)
    if causes:
        raise invalid(CRDS, name, causes)


def _check_structural(schema: dict[str, Any], where: str, causes: list[Cause]) -> None:
    if "type" not in schema and not (
        schema.get("x-kubernetes-int-or-string") or schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        causes.append(
            Cause(
                "FieldValueRequired", "Required value: must not be empty for specified object fields", f"{where}.type"
            )
        )
    if "properties" in schema and "additionalProperties" in schema:
        why = "Forbidden: additionalProperties and properties are mutual exclusive"
        causes.append(Cause("FieldValueForbidden", why, f"{where}.additionalProperties"))
    if "$ref" in schema:
        causes.append(Cause("FieldValueForbidden", "Forbidden: $ref is not supported", f"{where}.$ref"))
    if schema.get("uniqueItems"):
        why = "Forbidden: uniqueItems cannot be set to true since the runtime complexity becomes quadratic"
        causes.append(Cause("FieldValueForbidden", why, f"{where}.uniqueItems"))
    for key, inner in (schema.get("properties") or {}).items():
        if key == "metadata" and where.endswith("openAPIV3Schema"):
            continue
        _check_structural(inner, f"{where}.properties[{key}]", causes)
    if isinstance(schema.get("items"), dict):
        _check_structural(schema["items"], f"{where}.items", causes)
    if isinstance(schema.get("additionalProperties"), dict):
        _check_structural(schema["additionalProperties"], f"{where}.additionalProperties", causes)
    for key in schema.get("x-kubernetes-list-map-keys") or ():
        inner = (schema.get("items") or {}).get("properties", {}).get(key, {})
        if key not in (schema["items"].get("required") or ()) and "default" not in inner:
            why = (
                "Required value: this property is in x-kubernetes-list-map-keys, so it must have a default "
                "or be a required property"
            )
            causes.append(Cause("FieldValueRequired", why, f"{where}.items.properties[{key}].default"))


def established_status(crd: Object, before: Object | None) -> Object:
    """The status that a CustomResourceDefinition has once it is served."""
    names = crd["spec"]["names"]
    _, version = resource_of_crd(crd)
    stored = list(((before or {}).get("status") or {}).get("storedVersions") or ())
    now = timestamp()
    conditions = ((before or {}).get("status") or {}).get("conditions") or [
        {
            "type": "NamesAccepted",
            "status": "True",
            "reason": "NoConflicts",
            "message": "no conflicts found",
            "lastTransitionTime": now,
        },
        {
            "type": "Established",
            "status": "True",
            "reason": "InitialNamesAccepted",
            "message": "the initial names have been accepted",
            "lastTransitionTime": now,
        },
    ]
    return {
        "acceptedNames": dict(names),
        "conditions": conditions,
        "storedVersions": stored if version["name"] in stored else [*stored, version["name"]],
    }
