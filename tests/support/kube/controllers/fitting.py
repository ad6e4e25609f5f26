"""Which node a pod fits on, and the scheduler's words where it fits on none. Pure.

Looked at: requests against allocatable (with the number of pods), nodeSelector, required node affinity on labels,
`unschedulable`, taints. Not looked at: affinity between pods, topology spread, volumes, host ports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tests.support.kube.controllers.quantity import quantity

Object = Mapping[str, Any]
UNSCHEDULABLE_TAINT = "node.kubernetes.io/unschedulable"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node and what its pods have asked for."""

    node: Object
    used: Mapping[str, Decimal]


@dataclass(frozen=True, slots=True)
class Fit:
    """The node chosen; or none, and why."""

    node: str | None
    message: str = ""


def requests(pod: Object) -> dict[str, Decimal]:
    """What the pod asks for: the sum of its containers, or its largest init container; `pods` is 1."""
    total: dict[str, Decimal] = {"pods": Decimal(1)}
    for container in pod["spec"].get("containers") or ():
        for name, value in _requests(container).items():
            total[name] = total.get(name, Decimal(0)) + value
    for container in pod["spec"].get("initContainers") or ():
        for name, value in _requests(container).items():
            total[name] = max(total.get(name, Decimal(0)), value)
    return total


def add(used: Sequence[Mapping[str, Decimal]]) -> dict[str, Decimal]:
    total: Counter[str] = Counter()
    for each in used:
        for name, value in each.items():
            total[name] += value  # type: ignore[assignment]
    return dict(total)  # type: ignore[arg-type]


def choose(pod: Object, candidates: Sequence[Candidate]) -> Fit:
    """The fitting node with the fewest pods, by name where equal."""
    if not candidates:
        return Fit(None, "no nodes available to schedule pods")
    wanted = requests(pod)
    reasons: Counter[str] = Counter()
    victims: Counter[str] = Counter()
    fitting: list[Candidate] = []
    for candidate in candidates:
        unsuitable = _unsuitable(pod, candidate.node)
        short = [] if unsuitable else _insufficient(wanted, candidate)
        if unsuitable:
            reasons[unsuitable] += 1
            victims["Preemption is not helpful for scheduling"] += 1
        elif short:
            reasons.update(short)
            victims["No preemption victims found for incoming pod"] += 1
        else:
            fitting.append(candidate)
    if fitting:
        best = min(fitting, key=lambda each: (each.used.get("pods", Decimal(0)), each.node["metadata"]["name"]))
        return Fit(best.node["metadata"]["name"])
    head = f"0/{len(candidates)} nodes are available: "
    return Fit(None, f"{head}{_counted(reasons)}. preemption: {head}{_counted(victims)}.")


def _counted(reasons: Counter[str]) -> str:
    return ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))


def _requests(container: Object) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: quantity(value) for name, value in asked.items()}


def _insufficient(wanted: Mapping[str, Decimal], candidate: Candidate) -> list[str]:
    allocatable = (candidate.node.get("status") or {}).get("allocatable") or {}
    short = []
    for name, value in wanted.items():
        if value and value + candidate.used.get(name, Decimal(0)) > quantity(allocatable.get(name, 0)):
            short.append("Too many pods" if name == "pods" else f"Insufficient {name}")
    return short


def _unsuitable(pod: Object, node: Object) -> str:
    """Why the node is out whatever is free on it; empty: it is not."""
    spec = pod["spec"]
    tolerations = spec.get("tolerations") or ()
    taints = (node.get("spec") or {}).get("taints") or ()
    if (node.get("spec") or {}).get("unschedulable"):
        taint = {"key": UNSCHEDULABLE_TAINT, "effect": "NoSchedule"}
        if not any(_tolerates(each, taint) for each in tolerations):
            return "node(s) were unschedulable"
    for taint in taints:
        if taint["key"] == UNSCHEDULABLE_TAINT or taint["effect"] == "PreferNoSchedule":
            continue
        if not any(_tolerates(each, taint) for each in tolerations):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    return "" if _selected(spec, node) else "node(s) didn't match Pod's node affinity/selector"


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if toleration.get("key") and toleration["key"] != taint["key"]:
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return True
    return bool(toleration.get("key")) and toleration.get("value", "") == taint.get("value", "")


def _selected(spec: Object, node: Object) -> bool:
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(name) != value for name, value in (spec.get("nodeSelector") or {}).items()):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    return any(
        all(_holds(each, labels) for each in term.get("matchExpressions") or ())
        and all(_holds(each, {"metadata.name": node["metadata"]["name"]}) for each in term.get("matchFields") or ())
        for term in required["nodeSelectorTerms"]
    )


def _holds(requirement: Object, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(requirement["key"]), list(requirement.get("values") or ())
    operator: str = requirement["operator"]
    match operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and int(value) > int(values[0])
        case "Lt":
            return value is not None and int(value) < int(values[0])
    raise ValueError(f"{operator!r} is no operator of node affinity")
