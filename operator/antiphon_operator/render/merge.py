"""`podTemplate` laid over the rendered pod template.

Containers, init containers, volumes and environment variables are matched by name, volume mounts by path, labels and
annotations by key; every other field that `podTemplate` gives replaces the rendered one whole. Labels of ours stay as
they are, for the operator finds its pods by them. Fields that the Model has a typed field for never come here: they
were refused before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from antiphon_operator.render.metadata import Manifest

_CONTAINER_LISTS = {"env": "name", "volumeMounts": "mountPath"}


def merge_pod_template(rendered: Mapping[str, Any], given: Mapping[str, Any]) -> Manifest:
    """A new pod template; neither argument is changed."""
    metadata = dict(rendered["metadata"])
    asked = given.get("metadata") or {}
    for field in ("labels", "annotations"):
        both = {**(asked.get(field) or {}), **(metadata.get(field) or {})}
        if both:
            metadata[field] = both
    return {"metadata": metadata, "spec": _merge_spec(rendered["spec"], given.get("spec") or {})}


def _merge_spec(rendered: Mapping[str, Any], given: Mapping[str, Any]) -> Manifest:
    spec = dict(rendered)
    for field, value in given.items():
        if field in ("containers", "initContainers"):
            spec[field] = _merge_containers(rendered.get(field) or (), value)
        elif field == "volumes":
            spec[field] = _merge_list(rendered.get(field) or (), value, "name")
        else:
            spec[field] = value
    return spec


def _merge_containers(rendered: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]]) -> list[Manifest]:
    by_name = {container["name"]: container for container in given}
    known = [_merge_container(container, by_name.pop(container["name"], {})) for container in rendered]
    return [*known, *(dict(container) for container in by_name.values())]


def _merge_container(rendered: Mapping[str, Any], given: Mapping[str, Any]) -> Manifest:
    container = dict(rendered)
    for field, value in given.items():
        key = _CONTAINER_LISTS.get(field)
        container[field] = value if key is None else _merge_list(rendered.get(field) or (), value, key)
    return container


def _merge_list(rendered: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]], key: str) -> list[Manifest]:
    """Order is kept: a variable may refer to one before it."""
    by_key = {item[key]: dict(item) for item in rendered}
    by_key.update({item[key]: dict(item) for item in given})
    return list(by_key.values())
