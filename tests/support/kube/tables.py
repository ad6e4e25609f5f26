"""Tables: what `kubectl get` asks for. A custom resource's columns are its CRD's; a few built-in kinds have theirs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from tests.support.kube.objects import Object
from tests.support.kube.registry import Known

_AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
_BUILT_IN: dict[str, list[dict[str, Any]]] = {
    "Pod": [
        {"name": "Status", "type": "string", "jsonPath": ".status.phase"},
        {"name": "Node", "type": "string", "jsonPath": ".spec.nodeName", "priority": 1},
        _AGE,
    ],
    "StatefulSet": [
        {"name": "Ready", "type": "integer", "jsonPath": ".status.readyReplicas"},
        {"name": "Desired", "type": "integer", "jsonPath": ".spec.replicas"},
        _AGE,
    ],
    "Event": [
        {"name": "Last Seen", "type": "date", "jsonPath": ".lastTimestamp"},
        {"name": "Type", "type": "string", "jsonPath": ".type"},
        {"name": "Reason", "type": "string", "jsonPath": ".reason"},
        {"name": "Object", "type": "string", "jsonPath": ".involvedObject.name"},
        {"name": "Message", "type": "string", "jsonPath": ".message"},
    ],
}
_STEP = re.compile(r"\.([^.\[\]]+)|\['([^']+)'\]|\[\?\(@\.([^=]+)==[\"']([^\"']*)[\"']\)\]|\[(\d+|\*)\]")


def wants_table(accept: str) -> bool:
    return "as=Table" in accept


def at_path(value: Any, path: str) -> Any:
    """The first value at a JSON path such as `.status.conditions[?(@.type=="Ready")].status`; None if there is none."""
    here = value
    place = 0
    path = path.replace("\\.", "\0")
    while place < len(path):
        step = _STEP.match(path, place)
        if step is None:
            return None
        place = step.end()
        name, quoted, field, wanted, index = step.groups()
        if name or quoted:
            key = (name or quoted).replace("\0", ".")
            here = here.get(key) if isinstance(here, dict) else None
        elif not isinstance(here, list):
            return None
        elif field:
            here = next((item for item in here if isinstance(item, dict) and str(item.get(field)) == wanted), None)
        else:
            number = 0 if index == "*" else int(index)
            here = here[number] if number < len(here) else None
        if here is None:
            return None
    return here


def _cell(value: Object, column: dict[str, Any]) -> Any:
    found = at_path(value, column["jsonPath"])
    if found is None:
        return None if column["type"] != "string" else ""
    if column["type"] == "date":
        return _age(str(found))
    return str(found) if column["type"] == "string" and not isinstance(found, str) else found


def _age(since: str) -> str:
    """As kubectl's ages: two units at most while they matter."""
    try:
        seconds = int((datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds())
    except ValueError:
        return "<invalid>"
    if seconds < 120:
        return f"{max(seconds, 0)}s"
    if seconds < 7200:
        return f"{seconds // 60}m"
    if seconds < 172_800:
        return f"{seconds // 3600}h"
    return f"{seconds // 86_400}d"


def table_of(known: Known, values: Iterable[Object], *, with_columns: bool) -> Object:
    columns = list(known.columns) if known.custom else _BUILT_IN.get(known.resource.kind, [_AGE])
    if known.custom and not columns:
        columns = [_AGE]
    definitions = [{"name": "Name", "type": "string", "format": "name", "description": "Name", "priority": 0}]
    definitions += [
        {
            "name": column["name"],
            "type": "string" if column["type"] == "date" else column["type"],
            "format": column.get("format", ""),
            "description": column.get("description", ""),
            "priority": column.get("priority", 0),
        }
        for column in columns
    ]
    rows = [
        {
            "cells": [value["metadata"]["name"], *(_cell(value, column) for column in columns)],
            "object": {
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": value["metadata"],
            },
        }
        for value in values
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {},
        "columnDefinitions": definitions if with_columns else [],
        "rows": rows,
    }
