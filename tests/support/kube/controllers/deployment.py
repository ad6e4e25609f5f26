"""Deployments, straight to pods (no ReplicaSets between): the old go as the new become ready, within surge and
unavailability; `Recreate` deletes first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from tests.support.kube.controllers import clock
from tests.support.kube.controllers.loop import Controller
from tests.support.kube.controllers.mirror import Key, key_of
from tests.support.kube.controllers.pod_control import create_pod, delete_pod
from tests.support.kube.controllers.podinfo import (
    Object,
    controller_of,
    has_ended,
    is_ready,
    is_terminating,
    pod_from,
    template_hash,
    with_condition,
)
from tests.support.kube.resources import DEPLOYMENTS, PODS, Resource

COMPONENT = "replicaset-controller"
HASH_LABEL = "pod-template-hash"


class Deployments(Controller):
    _names = itertools.count(1)

    def keys(self, kind: str, resource: Resource, thing: Object) -> Iterable[Key]:
        if resource == DEPLOYMENTS:
            yield key_of(thing)
        elif resource == PODS and (owner := controller_of(thing)) is not None and owner["kind"] == "Deployment":
            yield thing["metadata"]["namespace"], owner["name"]

    def reconcile(self, key: Key) -> float | None:
        this = self.mirror.get(DEPLOYMENTS, key)
        if this is None or is_terminating(this):
            return None
        try:
            self._towards(this)
        finally:
            self._write_status(this)
        return None

    def _towards(self, this: Object) -> None:
        wanted = this["spec"].get("replicas", 1)
        digest = template_hash(this["spec"]["template"])
        for pod in self.mirror.pods_of(this):
            if has_ended(pod) and not is_terminating(pod):
                delete_pod(self.api, pod)
        alive = [pod for pod in self.mirror.pods_of(this) if not is_terminating(pod)]
        new = [pod for pod in alive if pod["metadata"]["labels"].get(HASH_LABEL) == digest]
        old = [pod for pod in alive if pod["metadata"]["labels"].get(HASH_LABEL) != digest]
        surge, unavailable = _bounds(this["spec"].get("strategy") or {}, wanted)
        recreate = (this["spec"].get("strategy") or {}).get("type") == "Recreate"
        if recreate:
            for pod in old:
                delete_pod(self.api, pod)
            if any(pod["metadata"]["labels"].get(HASH_LABEL) != digest for pod in self.mirror.pods_of(this)):
                return
            old = []
        room = min(wanted - len(new), wanted + surge - len(alive) if old else wanted - len(new))
        for _ in range(room):
            name = f"{this['metadata']['name']}-{digest}-{next(self._names):05d}"
            create_pod(self.api, this, pod_from(this["spec"]["template"], this, name, {HASH_LABEL: digest}), COMPONENT)
        for pod in sorted(new, key=is_ready)[: max(0, len(new) - wanted)]:
            delete_pod(self.api, pod)
        spare = sum(map(is_ready, alive)) - (wanted - unavailable)
        for pod in sorted(old, key=is_ready):
            if is_ready(pod):
                if spare <= 0:
                    break
                spare -= 1
            delete_pod(self.api, pod)

    def _write_status(self, this: Object) -> None:
        live = self.mirror.get(DEPLOYMENTS, key_of(this))
        if live is None:
            return
        digest = template_hash(live["spec"]["template"])
        pods = [pod for pod in self.mirror.pods_of(live) if not is_terminating(pod)]
        wanted = live["spec"].get("replicas", 1)
        ready = sum(map(is_ready, pods))
        updated = [pod for pod in pods if pod["metadata"]["labels"].get(HASH_LABEL) == digest]
        enough = ready >= wanted - _bounds(live["spec"].get("strategy") or {}, wanted)[1]
        complete = len(updated) == len(pods) == wanted == ready
        available = _condition("Available", enough, "MinimumReplicasAvailable", "MinimumReplicasUnavailable")
        progressing = _condition("Progressing", True, "NewReplicaSetAvailable" if complete else "ReplicaSetUpdated", "")
        status: dict[str, Any] = {
            "observedGeneration": live["metadata"]["generation"],
            "replicas": len(pods),
            "updatedReplicas": len(updated),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "unavailableReplicas": max(0, wanted - ready),
            "conditions": with_condition({"status": {"conditions": with_condition(live, available)}}, progressing),
        }
        old: Mapping[str, Any] = live.get("status") or {}
        if any(old.get(name) != value for name, value in status.items()):
            self.api.merge_patch(DEPLOYMENTS, *key_of(live), {"status": status}, subresource="status")


def _condition(kind: str, holds: bool, reason: str, reason_if_not: str) -> Object:
    return {
        "type": kind,
        "status": "True" if holds else "False",
        "reason": reason if holds else reason_if_not,
        "lastTransitionTime": clock.now(),
    }


def _bounds(strategy: Mapping[str, Any], wanted: int) -> tuple[int, int]:
    """(maxSurge, maxUnavailable) in pods; at least one of them is above 0."""
    rolling = strategy.get("rollingUpdate") or {}
    surge = _share(rolling.get("maxSurge", "25%"), wanted, math.ceil)
    unavailable = _share(rolling.get("maxUnavailable", "25%"), wanted, math.floor)
    return surge, unavailable if surge or unavailable else 1


def _share(value: int | str, of: int, rounded: Any) -> int:
    if isinstance(value, int):
        return value
    return int(rounded(int(value.removesuffix("%")) * of / 100))
