"""The status of PodDisruptionBudgets: how many of their pods may go by eviction now."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tests.support.kube.controllers import clock
from tests.support.kube.controllers.loop import Controller
from tests.support.kube.controllers.mirror import Key, key_of
from tests.support.kube.controllers.podinfo import (
    Object,
    controller_of,
    has_ended,
    is_ready,
    is_terminating,
    with_condition,
)
from tests.support.kube.resources import DEPLOYMENTS, POD_DISRUPTION_BUDGETS, PODS, STATEFULSETS, Resource
from tests.support.kube.selectors import matches

SCALED = {resource.kind: resource for resource in (STATEFULSETS, DEPLOYMENTS)}


class DisruptionBudgets(Controller):
    def keys(self, kind: str, resource: Resource, thing: Object) -> Iterable[Key]:
        if resource == POD_DISRUPTION_BUDGETS:
            yield key_of(thing)
        elif resource == PODS:
            for budget in self.mirror.all(POD_DISRUPTION_BUDGETS, thing["metadata"]["namespace"]):
                if _selects(budget, thing):
                    yield key_of(budget)
        elif resource in SCALED.values():
            for budget in self.mirror.all(POD_DISRUPTION_BUDGETS, thing["metadata"]["namespace"]):
                yield key_of(budget)

    def reconcile(self, key: Key) -> float | None:
        budget = self.mirror.get(POD_DISRUPTION_BUDGETS, key)
        if budget is None:
            return None
        pods = [pod for pod in self.mirror.all(PODS, key[0]) if _selects(budget, pod) and not has_ended(pod)]
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
        owners = {}
        alone = 0
        for pod in pods:
            owner = controller_of(pod)
            resource = SCALED.get(owner["kind"]) if owner else None
            live = (
                self.mirror.get(resource, (pod["metadata"]["namespace"], owner["name"])) if owner and resource else None
            )
            if live is None:
                alone += 1
            else:
                owners[live["metadata"]["uid"]] = live["spec"].get("replicas", 1)
        return alone + sum(owners.values())


def _selects(budget: Object, pod: Object) -> bool:
    return matches(budget["spec"].get("selector"), pod["metadata"].get("labels") or {})


def _desired(spec: Object, expected: int) -> int:
    if (at_least := spec.get("minAvailable")) is not None:
        return _count(at_least, expected)
    return max(0, expected - _count(spec.get("maxUnavailable", 0), expected))


def _count(value: int | str, of: int) -> int:
    """A number, or a share rounded up."""
    return value if isinstance(value, int) else math.ceil(int(value.removesuffix("%")) * of / 100)


def _condition(allowed: int) -> Object:
    return {
        "type": "DisruptionAllowed",
        "status": "True" if allowed else "False",
        "reason": "SufficientPods" if allowed else "InsufficientPods",
        "message": "",
        "lastTransitionTime": clock.now(),
    }
