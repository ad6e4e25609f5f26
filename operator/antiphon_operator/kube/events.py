"""Events about an object, as values: one object for equal ones, so that they are counted and never flood.

The name is made from what the event says, so the count stands in the cluster and outlives the operator.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Any, Literal

from antiphon_operator.kube.resources import Object
from antiphon_operator.names import FIELD_MANAGER

MAX_MESSAGE_CHARACTERS = 1024
"""The API's own limit."""


def event(
    about: Object, kind: Literal["Normal", "Warning"], reason: str, message: str, *, now: datetime, count: int = 1
) -> dict[str, Any]:
    """The Event as it is first written."""
    metadata = about["metadata"]
    namespace = metadata.get("namespace") or "default"
    shown = message if len(message) <= MAX_MESSAGE_CHARACTERS else message[: MAX_MESSAGE_CHARACTERS - 3] + "..."
    said = "\0".join((str(metadata.get("uid", "")), kind, reason, shown))
    at = timestamp(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name'][:200]}.{hashlib.sha256(said.encode()).hexdigest()[:16]}",
            "namespace": namespace,
        },
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "name": metadata["name"],
            "namespace": namespace,
            "uid": str(metadata.get("uid", "")),
            "resourceVersion": str(metadata.get("resourceVersion", "")),
        },
        "type": kind,
        "reason": reason,
        "message": shown,
        "count": count,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "reportingInstance": FIELD_MANAGER,
    }


def counted_up(live: Object, again: Object) -> dict[str, Any]:
    """Merge patch for an event that is there already."""
    return {"count": int(live.get("count") or 1) + again["count"], "lastTimestamp": again["lastTimestamp"]}


def timestamp(moment: datetime) -> str:
    """RFC 3339 in whole seconds, as `metav1.Time` is."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
