"""A pod's status as its kubelet writes it. Pure: what is known of the containers -> phase, conditions, statuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.kube.controllers import clock

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Exit:
    """How a container ended. `message` is what it left as its termination message."""

    code: int
    message: str = ""
    reason: str = ""
    signal: int = 0
    started_at: str = ""
    finished_at: str = field(default_factory=clock.now)

    def state(self, container_id: str) -> Object:
        told = {"message": self.message} if self.message else {}
        return {
            "exitCode": self.code,
            "reason": self.reason or ("Completed" if self.code == 0 else "Error"),
            "startedAt": self.started_at or self.finished_at,
            "finishedAt": self.finished_at,
            "containerID": container_id,
            **({"signal": self.signal} if self.signal else {}),
            **told,
        }


@dataclass(slots=True)
class ContainerRecord:
    """What the kubelet knows of one container. Exactly one of `running_since`, `ended`, or waiting is its state."""

    name: str
    image: str
    waiting: str = "ContainerCreating"
    waiting_message: str = ""
    running_since: str = ""
    ended: Exit | None = None
    last: Exit | None = None
    """How the run before this one ended."""
    started: bool = False
    ready: bool = False
    restarts: int = 0
    container_id: str = ""
    last_id: str = ""

    def wait(self, reason: str, message: str = "") -> None:
        self.waiting, self.waiting_message = reason, message
        self.running_since, self.ended, self.started, self.ready = "", None, False, False

    def run(self, container_id: str) -> None:
        self.waiting, self.waiting_message, self.ended = "", "", None
        self.running_since, self.container_id = clock.now(), container_id
        self.started, self.ready = False, False

    def end(self, how: Exit) -> None:
        self.waiting, self.running_since = "", ""
        self.ended, self.started, self.ready = how, False, False

    def remember(self) -> None:
        """Its end becomes the last run's, before the next run. After a back-off it is the last run's already."""
        if self.ended is not None:
            self.last, self.last_id = self.ended, self.container_id

    def status(self) -> Object:
        return {
            "name": self.name,
            "image": self.image,
            "imageID": "" if self.waiting and not self.container_id else f"test/{self.image}",
            "containerID": self.container_id,
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
            "state": self._state(),
            "lastState": {} if self.last is None else {"terminated": self.last.state(self.last_id)},
        }

    def _state(self) -> Object:
        if self.ended is not None:
            return {"terminated": self.ended.state(self.container_id)}
        if self.running_since:
            return {"running": {"startedAt": self.running_since}}
        told = {"message": self.waiting_message} if self.waiting_message else {}
        return {"waiting": {"reason": self.waiting, **told}}


def pod_status(
    pod: Mapping[str, Any],
    *,
    before: Mapping[str, Any],
    address: str,
    host_address: str,
    started_at: str,
    initialising: Sequence[ContainerRecord],
    containers: Sequence[ContainerRecord],
) -> Object:
    """The whole of what the kubelet owns in the pod's status; the scheduler's condition is kept. `before`: the status
    as it was last written, for the transition times."""
    initialised = all(each.ended is not None and each.ended.code == 0 for each in initialising)
    phase = _phase(pod, initialising, containers)
    ready = phase == "Running" and all(each.ready for each in containers)
    unready = [each.name for each in containers if not each.ready]
    because = (
        ("PodCompleted", "")
        if phase == "Succeeded"
        else ("ContainersNotReady", f"containers with unready status: [{' '.join(unready)}]")
    )
    theirs = (pod.get("status") or {}).get("conditions") or ()
    conditions = [
        *(each for each in theirs if each["type"] not in _OURS),
        _condition(before, "PodReadyToStartContainers", bool(address)),
        _condition(before, "Initialized", initialised, ("ContainersNotInitialized", "containers are initialising")),
        _condition(before, "ContainersReady", ready, because),
        _condition(before, "Ready", ready, because),
    ]
    status: Object = {
        "phase": phase,
        "conditions": conditions,
        "hostIP": host_address,
        "hostIPs": [{"ip": host_address}],
        "startTime": started_at,
        "qosClass": "Burstable",
        "containerStatuses": [each.status() for each in containers],
    }
    if address:
        status |= {"podIP": address, "podIPs": [{"ip": address}]}
    if initialising:
        status["initContainerStatuses"] = [each.status() for each in initialising]
    return status


_OURS = ("PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready")


def _phase(
    pod: Mapping[str, Any], initialising: Sequence[ContainerRecord], containers: Sequence[ContainerRecord]
) -> str:
    policy = pod["spec"].get("restartPolicy", "Always")
    if policy == "Never" and any(each.ended is not None and each.ended.code for each in initialising):
        return "Failed"
    if not all(each.ended is not None and each.ended.code == 0 for each in initialising):
        return "Pending"
    if policy != "Always" and all(each.ended is not None for each in containers):
        failed = any(each.ended is not None and each.ended.code for each in containers)
        if not failed:
            return "Succeeded"
        if policy == "Never":
            return "Failed"
    return "Running" if any(each.running_since or each.ended or each.last for each in containers) else "Pending"


def _condition(before: Mapping[str, Any], kind: str, holds: bool, because: tuple[str, str] = ("", "")) -> Object:
    """With the transition time of the one before, if it said the same."""
    old = next((each for each in before.get("conditions") or () if each["type"] == kind), None)
    status = "True" if holds else "False"
    since = old["lastTransitionTime"] if old is not None and old["status"] == status else clock.now()
    told: Object = {"reason": because[0], "message": because[1]} if because[0] and not holds else {}
    return {"type": kind, "status": status, "lastProbeTime": None, "lastTransitionTime": since, **told}
