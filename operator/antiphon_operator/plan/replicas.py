"""Replicas as they are: each one StatefulSet with its pods.

A replica is *alive* while its StatefulSet is not being deleted and none of its pods is on a lost node, and *live* when
it is not draining either. It is ready when it has all its pods and all are ready. What is not alive counts for
nothing: pods of a lost node may stay Terminating for ever.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from antiphon_operator import names
from antiphon_operator.names import Role
from antiphon_operator.plan.clock import moment
from antiphon_operator.plan.observed import Object
from antiphon_operator.plan.pods import Pod


@dataclass(frozen=True, slots=True)
class Replica:
    """See the module's docstring."""

    role: Role
    revision: str
    id: str
    name: str
    uid: str
    ordinal: int
    created: datetime | None
    draining_since: datetime | None
    drain_reason: str
    whole: str
    """Digest of its pods when it was first ready, if it is a gang and was."""
    going: bool
    lost: bool
    size: int
    """Pods that it should have."""
    pods: tuple[Pod, ...]
    stateful_set: Object

    @property
    def worker(self) -> str:
        """The pod that answers requests, by name: the worker's id."""
        return f"{self.name}-0"

    @property
    def worker_pod(self) -> Pod | None:
        return next((pod for pod in self.pods if pod.name == self.worker), None)

    @property
    def alive(self) -> bool:
        return not self.going and not self.lost

    @property
    def live(self) -> bool:
        return self.alive and self.draining_since is None

    @property
    def standing(self) -> tuple[Pod, ...]:
        return tuple(pod for pod in self.pods if not pod.terminating)

    @property
    def ready(self) -> bool:
        standing = self.standing
        return self.alive and len(standing) >= self.size and all(pod.ready for pod in standing)

    @property
    def has_requests(self) -> bool:
        """Whether its worker may have any: it was ready once and still runs."""
        worker = self.worker_pod
        return worker is not None and worker.started

    @property
    def pods_digest(self) -> str:
        told = sorted(f"{pod.uid}/{pod.restarts}" for pod in self.standing)
        return hashlib.sha256(" ".join(told).encode()).hexdigest()[:12]


def read_replicas(
    children: Iterable[Object], pods: Iterable[Pod], lost_nodes: frozenset[str], sizes: Mapping[tuple[str, str], int]
) -> tuple[Replica, ...]:
    """All replicas among the children, in the order they were made. `sizes`: pods of a replica, by (revision, role)."""
    pods_of: defaultdict[str, list[Pod]] = defaultdict(list)
    for pod in pods:
        pods_of[pod.owner_uid].append(pod)
    found = [
        _read(child, tuple(sorted(pods_of[child["metadata"]["uid"]], key=lambda pod: pod.name)), lost_nodes, sizes)
        for child in children
        if child["kind"] == "StatefulSet" and names.REPLICA_LABEL in (child["metadata"].get("labels") or {})
    ]
    return tuple(sorted(found, key=lambda replica: (replica.role, replica.ordinal, replica.name)))


def _read(
    child: Object, pods: tuple[Pod, ...], lost_nodes: frozenset[str], sizes: Mapping[tuple[str, str], int]
) -> Replica:
    metadata = child["metadata"]
    labels, annotations = metadata["labels"], metadata.get("annotations") or {}
    ordinal = annotations.get(names.ORDINAL_ANNOTATION, "")
    shape = (labels.get(names.REVISION_LABEL, ""), labels.get(names.ROLE_LABEL, "decode"))
    return Replica(
        role=cast("Role", labels.get(names.ROLE_LABEL, "decode")),
        revision=labels.get(names.REVISION_LABEL, ""),
        id=labels[names.REPLICA_LABEL],
        name=metadata["name"],
        uid=metadata["uid"],
        ordinal=int(ordinal) if ordinal.isdigit() else 0,
        created=moment(metadata.get("creationTimestamp")),
        draining_since=moment(annotations.get(names.DRAINING_SINCE_ANNOTATION)),
        drain_reason=annotations.get(names.DRAIN_REASON_ANNOTATION, ""),
        whole=annotations.get(names.WHOLE_ANNOTATION, ""),
        going=bool(metadata.get("deletionTimestamp")),
        lost=any(pod.node in lost_nodes for pod in pods),
        size=sizes.get(shape) or max(1, int((child.get("spec") or {}).get("replicas", 1))),
        pods=pods,
        stateful_set=child,
    )
