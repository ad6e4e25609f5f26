"""Small tools over raw Kubernetes objects: copies, times, owners."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object as JSON."""


def clone(value: Any) -> Any:
    """A deep copy of a JSON value (several times faster than `copy.deepcopy`)."""
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clone(item) for item in value]
    return value


def timestamp(moment: datetime | None = None) -> str:
    """RFC 3339 to the second, as the API writes times."""
    return (moment or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_uid() -> str:
    return str(uuid.uuid4())


def owner_uids(value: Object) -> list[str]:
    return [owner.get("uid", "") for owner in value["metadata"].get("ownerReferences") or ()]


def without(value: Object, *fields: str) -> Object:
    return {key: item for key, item in value.items() if key not in fields}
