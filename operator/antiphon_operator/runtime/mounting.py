"""Pods that wait for their volumes: what the loss of a Secret looks like to those who may not read Secrets. Pure."""

from __future__ import annotations

from datetime import datetime

from antiphon_operator.plan.observed import Object

_BEFORE_MOUNT = frozenset({"ContainerCreating", "PodInitializing"})


def mounting_since(pod: Object) -> datetime | None:
    """Since when the pod has been on its node without a sign of any of its containers; None: it is not so.

    A kubelet that pulls an image reports the same, so this says where to look, and not what is wrong.
    """
    status = pod.get("status") or {}
    if status.get("phase") != "Pending":
        return None
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting is None or waiting.get("reason") not in _BEFORE_MOUNT or container.get("lastState"):
            return None
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "True":
            return _time(condition.get("lastTransitionTime"))
    return None


def _time(stamp: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(stamp))
    except ValueError:
        return None
