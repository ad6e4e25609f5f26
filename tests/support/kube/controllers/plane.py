"""The control plane: every controller and the scheduler over one mirror, as one task."""

from __future__ import annotations

from tests.support.kube.api import Api
from tests.support.kube.controllers.deployment import Deployments
from tests.support.kube.controllers.disruption import DisruptionBudgets
from tests.support.kube.controllers.job import Jobs
from tests.support.kube.controllers.loop import ControllerLoop
from tests.support.kube.controllers.mirror import Mirror
from tests.support.kube.controllers.node_lifecycle import NodeLifecycle
from tests.support.kube.controllers.scheduler import Scheduler
from tests.support.kube.controllers.stateful_set import StatefulSets
from tests.support.kube.controllers.timing import Timing
from tests.support.kube.resources import (
    CONTROLLER_REVISIONS,
    DEPLOYMENTS,
    JOBS,
    NODES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    STATEFULSETS,
)

KINDS = (StatefulSets, Deployments, Jobs, DisruptionBudgets, NodeLifecycle, Scheduler)
WATCHED = (PODS, NODES, STATEFULSETS, DEPLOYMENTS, JOBS, POD_DISRUPTION_BUDGETS, CONTROLLER_REVISIONS)


class ControlPlane:
    """`run()` until cancelled. `failures`: what the controllers raised, which is a fault of the double."""

    def __init__(self, api: Api, timing: Timing) -> None:
        self._mirror = Mirror(api, *WATCHED)
        self._loop = ControllerLoop(self._mirror, timing, [kind(api, self._mirror, timing) for kind in KINDS])

    @property
    def failures(self) -> list[Exception]:
        return self._loop.failures

    async def run(self) -> None:
        try:
            await self._loop.run()
        finally:
            self._mirror.close()
