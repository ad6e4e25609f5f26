"""What the planner is shown: one consistent look at a Model and at all that matters to it.

Objects are as the API server gave them (parsed JSON), from the caches that kopf's watches fill. What costs a request
of its own (the last line of a crashed pod's log, events of a StatefulSet that makes no pods, whether a worker still
has requests) is asked for by the planner in `Plan.wants` and shown in the next look.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from antiphon_policy.scaling.remembered import Told

from antiphon_operator.resource.reasons import Reason

Object = Mapping[str, Any]
"""A Kubernetes object as parsed JSON. Never changed."""


@dataclass(frozen=True, slots=True)
class GatewayView:
    """What one gateway says of the model (its `/ready` page), by revision: how many workers it has a stream with."""

    address: str
    prefill: Mapping[str, int]
    decode: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class GatewayViews:
    """All gateways, asked at `asked_at`. `unreachable`: those that did not answer, with the reason."""

    asked_at: datetime
    views: tuple[GatewayView, ...]
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker's `/status` page, as far as the planner needs it."""

    asked_at: datetime
    idle: bool
    """No request, no prefill run for a peer, nothing pinned."""
    links: tuple[str, ...] = ()
    """Transports in use to its peers: `ucx`, `tcp`, ..."""
    problem: str = ""
    """Of a gang that does not serve (yet, or again): what is in its way."""


@dataclass(frozen=True, slots=True)
class AutoscalerView:
    """What the autoscaler says of the Model. In the modes Disabled and External it measures only."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """Replicas that each pool should have, by role."""
    edits: Mapping[str, int] = field(default_factory=dict)
    """How many hand edits of each Pool it knew of: against newer ones its word is void."""
    told: Told | None = None
    """The last decision that changed something."""
    limit: Limit | None = None
    """What keeps the pools from having what they need."""
    silent: bool = False
    """No gateway tells anything, so it keeps all as it is."""
    attainment: float | None = None
    """Share of the feasible requests of the window that were served inside the promise."""
    ttft_p95_ms: float | None = None
    tpot_p95_ms: float | None = None
    window_s: float = 300.0
    advice: str = ""
    """What a person could do that the autoscaler cannot."""
    lost_ms: Mapping[str, float] = field(default_factory=dict)
    """By pod name: what it would cost to lose the worker. Empty: nobody told anything of workers."""


@dataclass(frozen=True, slots=True)
class Limit:
    """More is needed than is allowed."""

    reason: Reason
    sentence: str


@dataclass(frozen=True, slots=True)
class Observed:
    """See the module's docstring."""

    model: Object
    """The Model."""
    children: tuple[Object, ...]
    """All objects that this Model controls (owner reference with its uid), of every kind the operator makes: Pool,
    ControllerRevision, StatefulSet, Service, ServiceAccount, PodDisruptionBudget, NetworkPolicy, Job, PodMonitor."""
    pods: tuple[Object, ...]
    """Pods of its replicas and Jobs, also terminating ones."""
    name_owners: Mapping[str, str] = field(default_factory=dict)
    """For each name in `spec.names`: `namespace/name` of the oldest Model that claims it."""
    lost_nodes: frozenset[str] = frozenset()
    """Nodes of its pods that are gone or not Ready (Unknown or False)."""
    claims: Mapping[str, Object] = field(default_factory=dict)
    """PersistentVolumeClaims that the Model names, by name."""
    events: Mapping[str, tuple[Object, ...]] = field(default_factory=dict)
    """Warning events by the uid of the object they are about, where the planner wanted them."""
    log_lines: Mapping[str, str] = field(default_factory=dict)
    """Last line of the crashed container's log, by pod uid, where the planner wanted it."""
    workers: Mapping[str, WorkerView] = field(default_factory=dict)
    """By pod name, where the planner wanted it."""
    gateways: GatewayViews | None = None
    """None: no gateway is configured, or none was asked yet."""
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    """For the pod security level of the namespace."""
    autoscaler: AutoscalerView | None = None
    """None: it has not looked at the Model yet, or is not to."""
