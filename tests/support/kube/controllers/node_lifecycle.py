"""What the control plane does about nodes that are not Ready, and about nodes that are gone.

A node that is not Ready: its pods are said to be not Ready at once, and deleted when their toleration of it has
passed. Nobody confirms that deletion, so they stay Terminating until the node is heard of again or its object is
deleted; pods of a node that does not exist are removed after a quarantine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from tests.support.kube.api import Api
from tests.support.kube.controllers import clock
from tests.support.kube.controllers.loop import Controller
from tests.support.kube.controllers.mirror import Key, Mirror, key_of
from tests.support.kube.controllers.pod_control import delete_pod
from tests.support.kube.controllers.podinfo import (
    Object,
    has_ended,
    is_ready,
    is_terminating,
    is_true,
    with_condition,
)
from tests.support.kube.controllers.timing import Timing
from tests.support.kube.resources import NODES, PODS, Resource

DEFAULT_TOLERATION_S = 300.0
QUARANTINE_S = 40.0
TAINT_KEYS = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")


class NodeLifecycle(Controller):
    def __init__(self, api: Api, mirror: Mirror, timing: Timing) -> None:
        super().__init__(api, mirror, timing)
        self._away_since_s: dict[str, float] = {}

    def keys(self, kind: str, resource: Resource, thing: Object) -> Iterable[Key]:
        if resource == NODES:
            yield key_of(thing)
        elif resource == PODS and (node := thing["spec"].get("nodeName")) and not is_terminating(thing):
            yield "", node

    def reconcile(self, key: Key) -> float | None:
        name = key[1]
        node = self.mirror.get(NODES, key)
        if node is not None and is_true(node, "Ready"):
            self._away_since_s.pop(name, None)
            return None
        since_s = self._away_since_s.setdefault(name, time.monotonic())
        away_s = (time.monotonic() - since_s) / self.timing.scale
        if node is None:
            return self._collect(name, away_s)
        return self._evict(name, away_s)

    def _collect(self, node: str, away_s: float) -> float | None:
        pods = self.mirror.pods_on(node)
        if pods and away_s < QUARANTINE_S:
            return QUARANTINE_S - away_s
        for pod in pods:
            delete_pod(self.api, pod, grace_s=0)
        return None

    def _evict(self, node: str, away_s: float) -> float | None:
        left_s = []
        for pod in self.mirror.pods_on(node):
            if is_ready(pod):
                self._say_not_ready(pod)
            if is_terminating(pod) or has_ended(pod):
                continue
            tolerated_s = _toleration_s(pod)
            if tolerated_s is None:
                continue
            if away_s >= tolerated_s:
                delete_pod(self.api, pod)
            else:
                left_s.append(tolerated_s - away_s)
        return min(left_s, default=None)

    def _say_not_ready(self, pod: Object) -> None:
        not_ready = {"type": "Ready", "status": "False", "lastProbeTime": None, "lastTransitionTime": clock.now()}
        patch = {"status": {"conditions": with_condition(pod, not_ready)}}
        self.api.merge_patch(PODS, *key_of(pod), patch, subresource="status")


def _toleration_s(pod: Object) -> float | None:
    """How long the pod stays on a node that is away; None: for ever."""
    found = [
        each
        for each in pod["spec"].get("tolerations") or ()
        if each.get("key") in (*TAINT_KEYS, None) and each.get("effect") in ("NoExecute", None, "")
    ]
    if not found:
        return DEFAULT_TOLERATION_S
    limits = [each["tolerationSeconds"] for each in found if each.get("tolerationSeconds") is not None]
    return float(min(limits)) if limits else None
