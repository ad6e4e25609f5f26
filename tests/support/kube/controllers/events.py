"""Kubernetes Events as controllers write them: an equal one is counted, not repeated."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from tests.support.kube.api import Api, ApiError
from tests.support.kube.controllers import clock
from tests.support.kube.resources import EVENTS


def event_body(about: Mapping[str, Any], *, kind: str, reason: str, message: str, component: str) -> dict[str, Any]:
    """`kind`: Normal or Warning. Equal events get the same name."""
    metadata = about["metadata"]
    namespace = metadata.get("namespace") or "default"
    digest = hashlib.sha256("\0".join((metadata.get("uid", ""), kind, reason, message)).encode()).hexdigest()[:16]
    time = clock.now()
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{digest}", "namespace": namespace},
        "involvedObject": {
            # What came in a list does not say what it is, and only pods are listed by those who post events.
            "apiVersion": about.get("apiVersion", "v1"),
            "kind": about.get("kind", "Pod"),
            "name": metadata["name"],
            "namespace": metadata.get("namespace", ""),
            "uid": metadata.get("uid", ""),
        },
        "type": kind,
        "reason": reason,
        "message": message,
        "source": {"component": component},
        "reportingComponent": component,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }


def post_event(api: Api, about: Mapping[str, Any], *, kind: str, reason: str, message: str, component: str) -> None:
    body = event_body(about, kind=kind, reason=reason, message=message, component=component)
    namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
    try:
        known = api.get(EVENTS, namespace, name)
    except ApiError:
        try:
            api.create(EVENTS, namespace, body)
        except ApiError:
            return  # the namespace goes: nobody will read it
        return
    counted = {"count": known["count"] + 1, "lastTimestamp": body["lastTimestamp"]}
    api.merge_patch(EVENTS, namespace, name, counted)
