"""Pods as the planner sees them: the few facts that it decides by, read once from the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from antiphon_operator.plan.clock import moment
from antiphon_operator.plan.observed import Object


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of a replica or of a Job."""

    name: str
    uid: str
    owner_uid: str
    """Of the StatefulSet or Job."""
    node: str
    created: datetime | None
    ready: bool
    started: bool
    """Its containers run and have passed their start-up probes once: it may have requests."""
    terminating: bool
    failed: bool
    restarts: int
    raw: Object


def condition(pod: Object, kind: str) -> Mapping[str, Any] | None:
    """The pod's condition of this type."""
    return next((c for c in (pod.get("status") or {}).get("conditions") or () if c.get("type") == kind), None)


def container_statuses(pod: Object) -> list[Mapping[str, Any]]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _started(status: Mapping[str, Any]) -> bool:
    for container in status.get("containerStatuses") or ():
        if "running" not in (container.get("state") or {}):
            return False
        if not container.get("started", container.get("ready", False)):
            return False
    return bool(status.get("containerStatuses"))


def read_pod(pod: Object) -> Pod:
    metadata, status = pod["metadata"], pod.get("status") or {}
    owner: Mapping[str, Any] = next((o for o in metadata.get("ownerReferences") or () if o.get("controller")), {})
    ready = condition(pod, "Ready")
    is_ready = ready is not None and ready.get("status") == "True"
    return Pod(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        owner_uid=owner.get("uid", ""),
        node=(pod.get("spec") or {}).get("nodeName") or "",
        created=moment(metadata.get("creationTimestamp")),
        ready=is_ready,
        started=is_ready or _started(status),
        terminating=bool(metadata.get("deletionTimestamp")),
        failed=status.get("phase") == "Failed",
        restarts=sum(int(c.get("restartCount", 0)) for c in status.get("containerStatuses") or ()),
        raw=pod,
    )
