"""Where the answers to the planner's wants come from: the API server, workers' pages, gateways' pages."""

from __future__ import annotations

from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.resources import EVENTS
from antiphon_operator.plan.observed import GatewayViews, Object, WorkerView
from antiphon_operator.runtime.gateways import Gateways
from antiphon_operator.runtime.objects import name_of, namespace_of
from antiphon_operator.runtime.workers import Workers

_SHOWN_EVENTS = 20


class ClusterSources:
    """See `wants.Sources`."""

    def __init__(self, client: KubeClient, workers: Workers, gateways: Gateways | None) -> None:
        self._client = client
        self._workers = workers
        self._gateways = gateways

    async def warning_events(self, namespace: str, uid: str) -> tuple[Object, ...]:
        """The newest warnings about an object, newest last."""
        found = await self._client.list(EVENTS, namespace, fields=f"involvedObject.uid={uid},type=Warning")
        return tuple(sorted(found, key=_when)[-_SHOWN_EVENTS:])

    async def crash_line(self, pod: Object) -> str:
        """The last line of the log of the container that crashed; empty if none did."""
        crashed = _crashed_container(pod)
        if crashed is None:
            return ""
        container, restarted = crashed
        return await self._client.pod_log_tail(namespace_of(pod), name_of(pod), container, previous=restarted)

    async def worker(self, pod: Object) -> WorkerView | None:
        return await self._workers.ask(pod)

    async def gateways(self, key: str) -> GatewayViews | None:
        return None if self._gateways is None else await self._gateways.views(key)


def _when(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")


def _crashed_container(pod: Object) -> tuple[str, bool] | None:
    """(name, whether it has been started again since) of the first container that ended badly."""
    status = pod.get("status") or {}
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        if (container.get("state") or {}).get("terminated", {}).get("exitCode"):
            return str(container["name"]), False
        if (container.get("lastState") or {}).get("terminated", {}).get("exitCode"):
            return str(container["name"]), True
    return None
