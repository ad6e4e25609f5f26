"""The status of PodDisruptionBudgets: how many of their pods may go by eviction now."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from tests.support.kube.api import Api
from tests.support.kube.controllers import clock
from tests.support.kube.controllers.loop import Controller
from tests.support.kube.controllers.mirror import Key, Mirror, key_of
from tests.support.kube.controllers.podinfo import (
    Object,
    controller_of,
    has_ended,
    is_ready,
    is_terminating,
    with_condition,
)
from tests.support.kube.controllers.timing import Timing
from tests.support.kube.resources import DEPLOYMENTS, POD_DISRUPTION_BUDGETS, PODS, STATEFULSETS, Resource
from tests.support.kube.selectors import matches

SCALED = {resource.kind: resource for resource in (STATEFULSETS, DEPLOYMENTS)}


class DisruptionBudgets(Controller):
    """Budgets are found by one pair of the labels they ask for: with hundreds of them, each pod touches one or two."""

    def __init__(self, api: Api, mirror: Mirror, timing: Timing) -> None:
        super().__init__(api, mirror, timing)
        self._by_pair: dict[tuple[str, str, str], set[Key]] = defaultdict(set)

    def keys(self, kind: str, resource: Resource, thing: Object) -> Iterable[Key]:
        if resource == POD_DISRUPTION_BUDGETS:
            self._by_pair[_pair(thing)].add(key_of(thing))
            yield key_of(thing)
        elif resource == PODS:
            yield from self._touched(thing["metadata"]["namespace"], thing["metadata"].get("labels") or {})
        elif resource in SCALED.values():
            labels = (thing["spec"]["template"].get("metadata") or {}).get("labels") or {}
            yield from self._touched(thing["metadata"]["namespace"], labels)

    def _touched(self, namespace: str, labels: Mapping[str, str]) -> Iterable[Key]:
        for name, value in (*labels.items(), ("", "")):
            yield from self._by_pair.get((namespace, name, value), ())

    def reconcile(self, key: Key) -> float | None:
        budget = self.mirror.get(POD_DISRUPTION_BUDGETS, key)
        if budget is None:
            return None
        pods = [pod for pod in self.mirror.pods_with(*_pair(budget)) if _selects(budget, pod) and not has_ended(pod)]
        expected = self._expected(pods)
        healthy = sum(is_ready(pod) and not is_terminating(pod) for pod in pods)
        desired = _desired(budget["spec"], expected)
        allowed = max(0, healthy - desired) if expected else 0
        status: dict[str, Any] = {
            "observedGeneration": budget["metadata"]["generation"],
            "currentHealthy": healthy,
            "desiredHealthy": desired,
            "expectedPods": expected,
            "disruptionsAllowed": allowed,
            "conditions": with_condition(budget, _condition(allowed)),
        }
        old = budget.get("status") or {}
        if any(old.get(name) != value for name, value in status.items()):
            self.api.merge_patch(POD_DISRUPTION_BUDGETS, *key, {"status": status}, subresource="status")
        return None

    def _expected(self, pods: list[Object]) -> int:
        """The replicas of the pods' controllers; a pod of none counts as one."""
        owners: dict[str, int] = {}
        alone = 0
        for pod in pods:
            owner = controller_of(pod)
            if owner is None or (resource := SCALED.get(owner["kind"])) is None:
                alone += 1
                continue
            live = self.mirror.get(resource, (pod["metadata"]["namespace"], owner["name"]))
            if live is None:
                alone += 1
            else:
                owners[live["metadata"]["uid"]] = live["spec"].get("replicas", 1)
        return alone + sum(owners.values())


def _pair(budget: Object) -> tuple[str, str, str]:
    """(namespace, label, value) that every pod of the budget has; empty ones where it asks for none by value."""
    labels = (budget["spec"].get("selector") or {}).get("matchLabels") or {}
    return (budget["metadata"]["namespace"], *max(labels.items(), default=("", "")))


def _selects(budget: Object, pod: Object) -> bool:
    return matches(budget["spec"].get("selector"), pod["metadata"].get("labels") or {})


def _desired(spec: Object, expected: int) -> int:
    at_least: int | str | None = spec.get("minAvailable")
    if at_least is not None:
        return _count(at_least, expected)
    at_most: int | str = spec.get("maxUnavailable", 0)
    return max(0, expected - _count(at_most, expected))


def _count(value: int | str, of: int) -> int:
    """A number, or a share rounded up."""
    if isinstance(value, int):
        return value
    share = int(value.removesuffix("%"))
    return math.ceil(share * of / 100)


def _condition(allowed: int) -> Object:
    return {
        "type": "DisruptionAllowed",
        "status": "True" if allowed else "False",
        "reason": "SufficientPods" if allowed else "InsufficientPods",
        "message": "",
        "lastTransitionTime": clock.now(),
    }
