"""Which kinds the operator watches, which part of each, and what it does without when its role does not allow one."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from antiphon_operator.kube import resources
from antiphon_operator.kube.errors import Forbidden, NotFound
from antiphon_operator.kube.resources import Resource
from antiphon_operator.names import MANAGED_BY, MANAGED_BY_LABEL

log = logging.getLogger("antiphon.operator.kinds")

OURS = f"{MANAGED_BY_LABEL}={MANAGED_BY}"


@dataclass(frozen=True, slots=True)
class Watched:
    """One kind to watch."""

    resource: Resource
    labels: str = ""
    """Only objects that match this selector."""
    without_it: str = ""
    """What the operator cannot do when it may not watch this kind; empty: it cannot work at all."""

    @property
    def kind(self) -> str:
        return self.resource.kind


CUSTOM = (Watched(resources.MODELS), Watched(resources.POOLS))
OTHERS = (
    Watched(resources.STATEFUL_SETS, OURS),
    Watched(resources.CONTROLLER_REVISIONS, OURS),
    Watched(resources.SERVICES, OURS),
    Watched(resources.SERVICE_ACCOUNTS, OURS),
    Watched(resources.POD_DISRUPTION_BUDGETS, OURS),
    Watched(resources.JOBS, OURS),
    # Also where none are made: those from before that was switched off are to go.
    Watched(resources.NETWORK_POLICIES, OURS),
    Watched(resources.PODS, OURS),
    Watched(resources.NODES, without_it="replicas on lost nodes are not replaced"),
    Watched(resources.NAMESPACES, without_it="the pod security level of namespaces is not known"),
    Watched(resources.PERSISTENT_VOLUME_CLAIMS, without_it="claims that Models name are not checked"),
)
POD_MONITOR = Watched(resources.POD_MONITORS, OURS, without_it="none is made: is the Prometheus operator there?")


class NotAllowedError(Exception):
    """The operator's role lacks what it cannot work without."""


def watched_kinds(*, pod_monitors: bool) -> tuple[Watched, ...]:
    return (*CUSTOM, *OTHERS, *((POD_MONITOR,) if pod_monitors else ()))


async def allowed_kinds(
    kinds: Sequence[Watched], may_list: Callable[[Watched], Awaitable[object]]
) -> tuple[Watched, ...]:
    """Those that the operator may list. `may_list` raises Forbidden or NotFound where not. Raises NotAllowedError."""
    allowed = []
    for watched in kinds:
        try:
            await may_list(watched)
        except (Forbidden, NotFound) as error:
            if not watched.without_it:
                raise NotAllowedError(
                    f"the operator cannot watch {watched.kind} objects: install the chart's role for its service "
                    f"account ({error})"
                ) from error
            log.warning("%s objects are not watched: %s (%s)", watched.kind, watched.without_it, error)
        else:
            allowed.append(watched)
    return tuple(allowed)
