"""`/openapi/v3`: what `kubectl explain` shows, and how kubectl learns that the server checks fields itself.

Schemas of built-in kinds are the published ones; those of custom resources are their CRDs', as they stand.
"""

from __future__ import annotations

from typing import Any

from tests.support.kube.errors import no_such_path
from tests.support.kube.registry import Known, Registry
from tests.support.kube.schema import definitions

_OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_KINDS = "x-kubernetes-group-version-kind"
_REFERENCE = "#/components/schemas/"


def document(registry: Registry, path: str) -> dict[str, Any] | None:
    """The document at a path, None if it is not one of these. Raises 404 for a group that is not served."""
    parts = [part for part in path.split("/") if part]
    if parts[:2] != ["openapi", "v3"]:
        return None
    if len(parts) == 2:
        versions = {known.resource.api_version for known in registry.all()}
        urls = {_root(each): {"serverRelativeURL": f"/openapi/v3/{_root(each)}?hash=0"} for each in sorted(versions)}
        return {"paths": urls}
    wanted = "/".join(parts[2:])
    of_group = [known for known in registry.all() if _root(known.resource.api_version) == wanted]
    if not of_group:
        raise no_such_path()
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for known in of_group:
        _add_kind(known, schemas)
        _add_paths(known, paths)
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.30.0"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _root(api_version: str) -> str:
    return f"apis/{api_version}" if "/" in api_version else f"api/{api_version}"


def _add_kind(known: Known, schemas: dict[str, Any]) -> None:
    resource = known.resource
    kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    if known.custom:
        name = ".".join([*reversed(resource.group.split(".")), resource.version, resource.kind])
        schema = dict(known.open_api)
        schema["properties"] = {
            **(schema.get("properties") or {}),
            "metadata": {"allOf": [{"$ref": _REFERENCE + _OBJECT_META}], "description": "Standard object's metadata."},
        }
        schemas[name] = schema | {_KINDS: [kind]}
        _add_definition(_OBJECT_META, schemas)
        return
    for name, raw in definitions().items():
        if kind in raw.get(_KINDS, ()):
            _add_definition(name, schemas)
            schemas[name] = schemas[name] | {_KINDS: [kind]}


def _add_definition(name: str, schemas: dict[str, Any]) -> None:
    if name in schemas:
        return
    schemas[name] = {}
    schemas[name] = _published(definitions()[name], schemas)


def _published(raw: Any, schemas: dict[str, Any]) -> Any:
    """OpenAPI v3 has no type that is a list, and its references are elsewhere."""
    if isinstance(raw, list):
        return [_published(item, schemas) for item in raw]
    if not isinstance(raw, dict):
        return raw
    result: dict[str, Any] = {}
    for key, item in raw.items():
        if key == "properties":  # Names of fields, which may be words of the schema too.
            result[key] = {name: _published(field, schemas) for name, field in item.items()}
        elif key == "$ref":
            target = item.rsplit("/", 1)[-1]
            _add_definition(target, schemas)
            result["allOf"] = [{"$ref": _REFERENCE + target}]
        elif key == "type" and isinstance(item, list):
            result["type"] = next((each for each in item if each != "null"), "object")
        elif key == "additionalProperties" and item is False:
            continue
        else:
            result[key] = _published(item, schemas)
    return result


def _add_paths(known: Known, paths: dict[str, Any]) -> None:
    resource = known.resource
    kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    inside = "/namespaces/{namespace}" if resource.namespaced else ""
    base = f"/{_root(resource.api_version)}{inside}/{resource.plural}"
    parameters = [{"name": name, "in": "query"} for name in ("dryRun", "fieldManager", "fieldValidation")]
    operation: dict[str, Any] = {"parameters": parameters, _KINDS: kind}
    paths[base] = {
        "get": {_KINDS: kind, "x-kubernetes-action": "list"},
        "post": operation | {"x-kubernetes-action": "post"},
    }
    paths[base + "/{name}"] = {
        "get": {_KINDS: kind, "x-kubernetes-action": "get"},
        "put": operation | {"x-kubernetes-action": "put"},
        "patch": operation | {"x-kubernetes-action": "patch"},
    }
