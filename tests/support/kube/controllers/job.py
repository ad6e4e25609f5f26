"""Jobs of one pod: tried again with back-off until `backoffLimit`, then Failed; Complete when its pod has succeeded.

Failed pods stay, for their termination message and log. `ttlSecondsAfterFinished` is ignored.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import NamedTuple

from tests.support.kube.api import Api
from tests.support.kube.controllers import clock
from tests.support.kube.controllers.events import post_event
from tests.support.kube.controllers.loop import Controller
from tests.support.kube.controllers.mirror import Key, Mirror, key_of
from tests.support.kube.controllers.pod_control import create_pod, delete_pod
from tests.support.kube.controllers.podinfo import (
    Object,
    condition,
    controller_of,
    has_ended,
    is_ready,
    is_terminating,
    is_true,
    phase,
    pod_from,
    with_condition,
)
from tests.support.kube.controllers.timing import Timing
from tests.support.kube.resources import JOBS, PODS, Resource

COMPONENT = "job-controller"
BACK_OFF_S = 10.0
MAX_BACK_OFF_S = 360.0


class Jobs(Controller):
    _names = itertools.count(1)

    def __init__(self, api: Api, mirror: Mirror, timing: Timing) -> None:
        super().__init__(api, mirror, timing)
        self._seen_at_s: dict[str, float] = {}

    def keys(self, kind: str, resource: Resource, thing: Object) -> Iterable[Key]:
        if resource == JOBS:
            yield key_of(thing)
        elif resource == PODS and (owner := controller_of(thing)) is not None and owner["kind"] == "Job":
            yield thing["metadata"]["namespace"], owner["name"]

    def reconcile(self, key: Key) -> float | None:
        this = self.mirror.get(JOBS, key)
        if this is None or is_terminating(this) or is_true(this, "Complete") or is_true(this, "Failed"):
            return None
        pods = self.mirror.pods_of(this)
        active = [pod for pod in pods if not has_ended(pod) and not is_terminating(pod)]
        failed = [pod for pod in pods if phase(pod) == "Failed"]
        if any(phase(pod) == "Succeeded" for pod in pods):
            self._finish(this, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")
            return None
        for pod in failed:
            if (match := _policy(this, pod)) is not None and match.action == "FailJob":
                self._give_up(this, active, "PodFailurePolicy", match.message)
                return None
        counted = [pod for pod in failed if (match := _policy(this, pod)) is None or match.action != "Ignore"]
        failures = len(counted) + sum(map(_restarts, active))
        if failures > this["spec"].get("backoffLimit", 6):
            self._give_up(this, active, "BackoffLimitExceeded", "Job has reached the specified backoff limit")
            return None
        deadline_s = this["spec"].get("activeDeadlineSeconds")
        left_s = None if deadline_s is None else deadline_s - self._since_seen_s(this)
        if left_s is not None and left_s <= 0:
            self._give_up(this, active, "DeadlineExceeded", "Job was active longer than specified deadline")
            return None
        if this["spec"].get("suspend"):
            for pod in active:
                delete_pod(self.api, pod)
        elif not active:
            wait_s = self._back_off_s(failed)
            if wait_s > 0:
                self._write_status(this)
                return wait_s
            create_pod(self.api, this, self._pod(this), COMPONENT)
        self._write_status(this)
        return left_s

    def _back_off_s(self, failed: list[Object]) -> float:
        """What is left of it, unscaled."""
        if not failed:
            return 0.0
        since_s = min(self._since_seen_s(pod) for pod in failed)
        return min(BACK_OFF_S * 2.0 ** (len(failed) - 1), MAX_BACK_OFF_S) - since_s

    def _since_seen_s(self, thing: Object) -> float:
        """Unscaled seconds since it was first asked about: times in objects are whole seconds, too coarse here."""
        now_s = time.monotonic()
        return (now_s - self._seen_at_s.setdefault(thing["metadata"]["uid"], now_s)) / self.timing.scale

    def _pod(self, this: Object) -> Object:
        name, uid = this["metadata"]["name"], this["metadata"]["uid"]
        labels = {"job-name": name, "controller-uid": uid}
        labels |= {f"batch.kubernetes.io/{key}": value for key, value in labels.items()}
        return pod_from(this["spec"]["template"], this, f"{name}-{next(self._names):05d}", labels)

    def _give_up(self, this: Object, active: list[Object], reason: str, message: str) -> None:
        for pod in active:
            delete_pod(self.api, pod)
        self._finish(this, "Failed", reason, message)
        post_event(self.api, this, kind="Warning", reason=reason, message=message, component=COMPONENT)

    def _finish(self, this: Object, kind: str, reason: str, message: str) -> None:
        at = clock.now()
        first = "SuccessCriteriaMet" if kind == "Complete" else "FailureTarget"
        for each in (first, kind):  # two writes, as the real controller's
            live = self.mirror.get(JOBS, key_of(this)) or this
            new = {
                "type": each,
                "status": "True",
                "reason": reason,
                "message": message,
                "lastProbeTime": at,
                "lastTransitionTime": at,
            }
            status: Object = {"conditions": with_condition(live, new)}
            if each == "Complete":
                status["completionTime"] = at
            self.api.merge_patch(JOBS, *key_of(this), {"status": status}, subresource="status")
        self._write_status(this)

    def _write_status(self, this: Object) -> None:
        live = self.mirror.get(JOBS, key_of(this))
        if live is None:
            return
        pods = self.mirror.pods_of(live)
        active = [pod for pod in pods if not has_ended(pod) and not is_terminating(pod)]
        old = live.get("status") or {}
        status: Object = {
            "startTime": old.get("startTime") or clock.now(),
            "active": len(active),
            "ready": sum(map(is_ready, active)),
            "succeeded": sum(phase(pod) == "Succeeded" for pod in pods),
            "failed": sum(phase(pod) == "Failed" for pod in pods),
            "uncountedTerminatedPods": {},
        }
        if any(old.get(name) != value for name, value in status.items()):
            self.api.merge_patch(JOBS, *key_of(live), {"status": status}, subresource="status")


def _restarts(pod: Object) -> int:
    return sum(each.get("restartCount", 0) for each in (pod.get("status") or {}).get("containerStatuses") or ())


class _Match(NamedTuple):
    action: str
    message: str


def _policy(this: Object, pod: Object) -> _Match | None:
    """The first rule of the Job's podFailurePolicy that this failed pod matches."""
    for index, rule in enumerate((this["spec"].get("podFailurePolicy") or {}).get("rules") or ()):
        wanted = rule.get("onExitCodes")
        for container, code in _exit_codes(pod).items() if wanted else ():
            inside = code in wanted["values"]
            if wanted.get("containerName", container) == container and code and inside == (wanted["operator"] == "In"):
                where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
                said = f"Container {container} for pod {where} failed with exit code {code} matching {rule['action']}"
                return _Match(rule["action"], f"{said} rule at index {index}")
        for each in rule.get("onPodConditions") or ():
            found = condition(pod, each["type"])
            if found is not None and found["status"] == each.get("status", "True"):
                return _Match(rule["action"], f"Pod {pod['metadata']['name']} has condition {each['type']}")
    return None


def _exit_codes(pod: Object) -> dict[str, int]:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    ended = {each["name"]: (each.get("state") or {}).get("terminated") for each in statuses}
    return {name: state["exitCode"] for name, state in ended.items() if state}
