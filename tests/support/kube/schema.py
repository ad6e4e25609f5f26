"""One view of an object's schema, for built-in kinds and custom resources alike.

It tells how lists and maps merge (`x-kubernetes-list-type` and its kin), which fields exist, and their defaults.
Built-in kinds come from the published OpenAPI definitions of Kubernetes 1.30 in `kubernetes-validate`; custom ones from
their CustomResourceDefinition. Where nothing is known, maps merge key by key and lists are one value.
"""

from __future__ import annotations

import json
from functools import cache, cached_property
from importlib import resources as package_files
from typing import Any

from tests.support.kube.resources import Resource

Raw = dict[str, Any]
BUILT_IN_VERSION = "1.30"


class Schema:
    """A node of a schema. Cheap to make, cached below."""

    def __init__(self, raw: Raw) -> None:
        self.raw = _resolved(raw)
        self._children: dict[str, Schema] = {}

    @cached_property
    def properties(self) -> Raw:
        return self.raw.get("properties") or {}

    @cached_property
    def extra(self) -> Raw | bool:
        """Schema of keys that are not listed; False where there may be none."""
        allowed = self.raw.get("additionalProperties")
        if isinstance(allowed, dict):
            return allowed
        if self.properties:
            return bool(self.raw.get("x-kubernetes-preserve-unknown-fields", allowed is True))
        return True

    @property
    def keeps_unknown(self) -> bool:
        return self.extra is not False

    def child(self, name: str) -> Schema:
        found = self._children.get(name)
        if found is None:
            raw = self.properties.get(name)
            if raw is None:
                raw = self.extra if isinstance(self.extra, dict) else {}
            found = self._children[name] = Schema(raw)
        return found

    @cached_property
    def items(self) -> Schema:
        return Schema(self.raw.get("items") or {})

    @cached_property
    def list_type(self) -> str:
        return str(self.raw.get("x-kubernetes-list-type", "atomic"))

    @cached_property
    def list_keys(self) -> tuple[str, ...]:
        return tuple(self.raw.get("x-kubernetes-list-map-keys", ()))

    @cached_property
    def merge_key(self) -> str:
        """Of a strategic merge patch."""
        return str(self.raw.get("x-kubernetes-patch-merge-key", ""))

    @cached_property
    def merges_strategically(self) -> bool:
        return "merge" in str(self.raw.get("x-kubernetes-patch-strategy", ""))

    @cached_property
    def atomic_map(self) -> bool:
        return self.raw.get("x-kubernetes-map-type") == "atomic"

    @property
    def default(self) -> Any:
        return self.raw.get("default")


def _resolved(raw: Raw) -> Raw:
    """Follow references; what stands beside one (a default, a list's type) is kept."""
    while "$ref" in raw:
        target = definitions()[raw["$ref"].rsplit("/", 1)[-1]]
        raw = target | {key: value for key, value in raw.items() if key != "$ref"}
    return raw


@cache
def definitions() -> Raw:
    """The published definitions, by their full names."""
    folder = package_files.files("kubernetes_validate") / "kubernetes-json-schema"
    text = (folder / f"v{BUILT_IN_VERSION}.0-local-strict" / "_definitions.json").read_text()
    return json.loads(text)["$defs"]  # type: ignore[no-any-return]


@cache
def _kinds() -> dict[tuple[str, str, str], Raw]:
    """(group, version, kind) -> definition."""
    found = {}
    for raw in definitions().values():
        for place in raw.get("x-kubernetes-group-version-kind", ()):
            found[(place["group"], place["version"], place["kind"])] = raw
    return found


ANYTHING = Schema({})


@cache
def built_in_schema(resource: Resource) -> Schema:
    """Of a kind that Kubernetes itself has; one that merges as best it can where there is none."""
    raw = _kinds().get((resource.group, resource.version, resource.kind))
    return Schema(raw) if raw else ANYTHING


@cache
def metadata_schema() -> Raw:
    """ObjectMeta, which the schema of a CustomResourceDefinition leaves out."""
    return _resolved(definitions()["io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"])


def custom_schema(open_api: Raw) -> Schema:
    """Of a custom resource: its own schema, with the metadata that every object has."""
    raw = open_api | {
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            **(open_api.get("properties") or {}),
            "metadata": metadata_schema(),
        }
    }
    return Schema(raw)
