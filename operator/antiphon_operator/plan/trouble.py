"""Why replicas are not ready, in one word and one sentence: read from pods, events and the last lines of logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from antiphon_operator.plan.observed import Observed
from antiphon_operator.plan.pods import Pod, condition, container_statuses
from antiphon_operator.plan.replicas import Replica
from antiphon_operator.resource.reasons import Reason

_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"})
_CONFIG = frozenset({"CreateContainerConfigError"})
_LONGEST_QUOTE = 300

SEVERITY: tuple[Reason, ...] = (
    Reason.ENGINE_CRASH,
    Reason.OUT_OF_MEMORY,
    Reason.IMAGE_PULL,
    Reason.CONFIG_MISSING,
    Reason.POD_SECURITY,
    Reason.POD_REFUSED,
    Reason.QUOTA_EXCEEDED,
    Reason.INSUFFICIENT_GPUS,
    Reason.INSUFFICIENT_RESOURCES,
    Reason.UNSCHEDULABLE,
    Reason.GANG_UNSCHEDULABLE,
    Reason.VOLUME_NOT_READY,
    Reason.EVICTED,
    Reason.NODE_LOST,
    Reason.GANG_INCOMPLETE,
    Reason.BACKING_OFF,
    Reason.SCALING,
    Reason.STARTING,
)
"""What is told first where there is more than one: what a person has to mend before what heals by itself, and a pod
that finds no node before the gang that lacks it."""
GANG_UNSCHEDULABLE = f"{Reason.GANG_UNSCHEDULABLE}: "
"""How a worker's words begin that finds no place for its ranks: its last ones, or those on its page."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One cause."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Findings:
    """Troubles of some replicas, and what should be looked up to tell more."""

    worst: Trouble | None
    events_of: frozenset[str]
    log_of: frozenset[str]
    pages_of: frozenset[str]


def find_trouble(replicas: Iterable[Replica], observed: Observed, accelerator: str | None, namespace: str) -> Findings:
    """`replicas`: those that should be ready; the ready ones among them have no trouble."""
    found: list[Trouble] = []
    events_of: set[str] = set()
    log_of: set[str] = set()
    pages_of: set[str] = set()
    for replica in replicas:
        if replica.lost:
            found.append(Trouble(Reason.NODE_LOST, f"a node of {replica.name} is gone or does not answer"))
            continue
        if replica.ready:
            continue
        if len(replica.standing) < replica.size:
            events_of.add(replica.uid)
            found.append(_of_events(replica, observed, accelerator, namespace))
        if _waits_for_ranks(replica):
            pages_of.add(replica.worker)
            problem = _of_page(replica, observed)
            if problem is not None:
                found.append(problem)
        for pod in replica.standing:
            if not pod.ready:
                found.append(_of_pod(pod, observed, accelerator, namespace))
                if crashed(pod):
                    log_of.add(pod.name)
                elif pod.node and not pod.started:
                    events_of.add(pod.uid)
    worst = min(found, key=lambda trouble: SEVERITY.index(trouble.reason), default=None)
    return Findings(worst, frozenset(events_of), frozenset(log_of), frozenset(pages_of))


def _waits_for_ranks(replica: Replica) -> bool:
    """All pods of a gang are there, and only the one that answers requests is not ready: it starts the ranks."""
    waiting = [pod for pod in replica.standing if not pod.ready]
    return replica.size > 1 and len(replica.standing) >= replica.size and waiting == [replica.worker_pod]


def _of_page(replica: Replica, observed: Observed) -> Trouble | None:
    """What its worker says is in the way."""
    view = observed.workers.get(replica.worker)
    if view is None or not view.problem:
        return None
    return _no_place(replica.worker, view.problem) or Trouble(
        Reason.STARTING, f"{replica.worker} is starting its ranks again: {_quote(view.problem)}"
    )


def _no_place(pod: str, words: str) -> Trouble | None:
    """From the words of a worker that has not found a place for its ranks."""
    if not words.startswith(GANG_UNSCHEDULABLE):
        return None
    said = _quote(words.removeprefix(GANG_UNSCHEDULABLE)).rstrip(".")
    return Trouble(Reason.GANG_UNSCHEDULABLE, f"{pod}: {said}: change parallelism, gpusPerPod or resources of the pool")


def crashed(pod: Pod) -> bool:
    return any(_exit(status) is not None for status in container_statuses(pod.raw))


def _exit(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How the container ended last, unless it ended well or nothing is wrong since."""
    state, last = status.get("state") or {}, status.get("lastState") or {}
    ended = state.get("terminated") or (last.get("terminated") if not status.get("ready") else None)
    return ended if ended and (ended.get("exitCode", 0) != 0 or status.get("restartCount", 0) > 0) else None


def _quote(text: object) -> str:
    line = " ".join(str(text or "").split())
    return line if len(line) <= _LONGEST_QUOTE else line[: _LONGEST_QUOTE - 3] + "..."


def _of_events(replica: Replica, observed: Observed, accelerator: str | None, namespace: str) -> Trouble:
    """A StatefulSet that lacks pods: why the API server refuses them stands in its events only."""
    events = [event for event in observed.events.get(replica.uid, ()) if event.get("reason") == "FailedCreate"]
    if not events:
        return Trouble(Reason.STARTING, f"the pods of {replica.name} are being made")
    said = _quote(max(events, key=lambda event: str(event.get("lastTimestamp") or "")).get("message"))
    lower = said.lower()
    if "exceeded quota" in lower or "must specify" in lower:
        return Trouble(
            Reason.QUOTA_EXCEEDED,
            f"{said}: raise the quota or free some of it (kubectl describe resourcequota -n {namespace})",
        )
    if "podsecurity" in lower:
        return Trouble(
            Reason.POD_SECURITY,
            f"{said}: label the namespace pod-security.kubernetes.io/enforce=privileged, or change what is refused",
        )
    if accelerator is not None and accelerator.lower() in lower and "insufficient" in lower:
        return Trouble(Reason.INSUFFICIENT_GPUS, f"{said}: add nodes with {accelerator}, or lower replicas")
    return Trouble(Reason.POD_REFUSED, f"{said}: change what is refused, or the policy that refuses it")


def _of_pod(pod: Pod, observed: Observed, accelerator: str | None, namespace: str) -> Trouble:
    scheduled = condition(pod.raw, "PodScheduled")
    if not pod.node and scheduled is not None and scheduled.get("status") == "False":
        return _unscheduled(pod, _quote(scheduled.get("message")), accelerator)
    status = pod.raw.get("status") or {}
    if pod.failed and status.get("reason") == "Evicted":
        return Trouble(Reason.EVICTED, f"{pod.name} was put out by its node: {_quote(status.get('message'))}")
    for container in container_statuses(pod.raw):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _IMAGE:
            said = _quote(waiting.get("message")) or container.get("image", "")
            return Trouble(
                Reason.IMAGE_PULL,
                f"{pod.name} cannot pull its image: {said}: correct spec.engine.image or spec.imagePullSecrets",
            )
        if waiting.get("reason") in _CONFIG:
            return Trouble(
                Reason.CONFIG_MISSING, f"{pod.name}: {_quote(waiting.get('message'))}: create what is missing"
            )
        ended = _exit(container)
        if ended is not None:
            return _crash(pod, container, ended, observed, namespace)
    return _of_pod_events(pod, observed)


def _unscheduled(pod: Pod, said: str, accelerator: str | None) -> Trouble:
    if accelerator is not None and f"insufficient {accelerator}".lower() in said.lower():
        return Trouble(
            Reason.INSUFFICIENT_GPUS,
            f"{pod.name} finds no node with free {accelerator}: {said}: add nodes, or lower replicas or gpusPerPod",
        )
    if "insufficient" in said.lower():
        return Trouble(
            Reason.INSUFFICIENT_RESOURCES, f"{pod.name} finds no node: {said}: add nodes, or lower its resources"
        )
    return Trouble(
        Reason.UNSCHEDULABLE,
        f"{pod.name} finds no node: {said}: look at node selector, affinity and tolerations in podTemplate",
    )


def _crash(
    pod: Pod, container: Mapping[str, Any], ended: Mapping[str, Any], observed: Observed, namespace: str
) -> Trouble:
    if ended.get("reason") == "OOMKilled":
        return Trouble(
            Reason.OUT_OF_MEMORY, f"{pod.name} needed more memory than its limit: raise resources.limits.memory"
        )
    last_words = str(ended.get("message") or "")
    no_place = _no_place(pod.name, last_words)
    if no_place is not None:
        return no_place
    line = _quote(observed.log_lines.get(pod.uid) or last_words)
    said = f'"{line}"' if line else f"exit code {ended.get('exitCode')}"
    return Trouble(
        Reason.ENGINE_CRASH,
        f"{pod.name} ended ({container.get('restartCount', 0)} restarts): {said}: "
        f"kubectl logs -n {namespace} {pod.name} --previous",
    )


def _of_pod_events(pod: Pod, observed: Observed) -> Trouble:
    for event in observed.events.get(pod.uid, ()):
        if event.get("reason") in ("FailedMount", "FailedAttachVolume"):
            return Trouble(Reason.VOLUME_NOT_READY, f"{pod.name}: {_quote(event.get('message'))}")
    return Trouble(Reason.STARTING, f"{pod.name} is starting: loading the model may take minutes")
