"""The scheduler: binds pods to nodes one by one, oldest first, and says why one cannot be placed.

A pod that does not fit is looked at again whenever a node changes or a pod frees its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from tests.support.kube.api import Api
from tests.support.kube.controllers import clock
from tests.support.kube.controllers.events import post_event
from tests.support.kube.controllers.fitting import Candidate, Fit, add, choose, requests
from tests.support.kube.controllers.loop import Controller
from tests.support.kube.controllers.mirror import Key, Mirror, key_of
from tests.support.kube.controllers.podinfo import Object, condition, has_ended, is_terminating, with_condition
from tests.support.kube.controllers.timing import Timing
from tests.support.kube.resources import NODES, PODS, Resource

NAME = "default-scheduler"


class Scheduler(Controller):
    def __init__(self, api: Api, mirror: Mirror, timing: Timing) -> None:
        super().__init__(api, mirror, timing)
        self._requests: dict[str, dict[str, Decimal]] = {}
        """By the pod's uid, since they never change."""

    def keys(self, kind: str, resource: Resource, thing: Object) -> Iterable[Key]:
        if resource == NODES:
            yield from self._waiting()
        elif resource == PODS:
            if kind == "DELETED" or has_ended(thing):
                yield from self._waiting()
            elif _is_mine(thing) and kind == "ADDED":
                yield key_of(thing)

    def reconcile(self, key: Key) -> float | None:
        pod = self.mirror.get(PODS, key)
        if pod is None or not _is_mine(pod):
            return None
        if pod["spec"].get("schedulingGates"):
            self._say(pod, "SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates")
            return 1.0
        fit = choose(pod, [Candidate(node, self._used(node)) for node in self.mirror.all(NODES)])
        if fit.node is None:
            self._refuse(pod, fit)
        else:
            self._bind(pod, fit.node)
        return None

    def _waiting(self) -> list[Key]:
        return [key_of(pod) for pod in sorted(self.mirror.all(PODS), key=_age) if _is_mine(pod)]

    def _used(self, node: Object) -> dict[str, Decimal]:
        return add([self._wants(pod) for pod in self.mirror.pods_on(node["metadata"]["name"]) if not has_ended(pod)])

    def _wants(self, pod: Object) -> dict[str, Decimal]:
        uid = pod["metadata"]["uid"]
        if uid not in self._requests:
            self._requests[uid] = requests(pod)
        return self._requests[uid]

    def _bind(self, pod: Object, node: str) -> None:
        namespace, name = key_of(pod)
        scheduled = {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": clock.now()}
        patch = {"status": {"conditions": with_condition(pod, scheduled)}}
        self.api.merge_patch(PODS, namespace, name, patch, subresource="status")
        self.api.merge_patch(PODS, namespace, name, {"spec": {"nodeName": node}})  # last: the kubelet begins with this
        message = f"Successfully assigned {namespace}/{name} to {node}"
        post_event(self.api, pod, kind="Normal", reason="Scheduled", message=message, component=NAME)

    def _refuse(self, pod: Object, fit: Fit) -> None:
        self._say(pod, "Unschedulable", fit.message)
        post_event(self.api, pod, kind="Warning", reason="FailedScheduling", message=fit.message, component=NAME)

    def _say(self, pod: Object, reason: str, message: str) -> None:
        known = condition(pod, "PodScheduled") or {}
        if (known.get("reason"), known.get("message")) == (reason, message):
            return
        new = {
            "type": "PodScheduled",
            "status": "False",
            "reason": reason,
            "message": message,
            "lastProbeTime": None,
            "lastTransitionTime": clock.now(),
        }
        patch = {"status": {"conditions": with_condition(pod, new)}}
        self.api.merge_patch(PODS, *key_of(pod), patch, subresource="status")


def _is_mine(pod: Object) -> bool:
    return (
        not pod["spec"].get("nodeName")
        and not is_terminating(pod)
        and not has_ended(pod)
        and pod["spec"].get("schedulerName", NAME) == NAME
    )


def _age(pod: Object) -> tuple[str, Key]:
    return pod["metadata"]["creationTimestamp"], key_of(pod)
