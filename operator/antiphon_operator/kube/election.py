"""May the Lease be taken? Pure.

Never decided by comparing clocks of two machines: what another holder wrote is only looked at for being *other* than
last time. A Lease has run out when its record has stood unchanged, on our own clock, for as long as it promises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from antiphon_operator.kube.resources import LEASES, Object


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    """Holders stop writing `renew_deadline_s` after their last renewal; others wait `lease_s` after they saw it."""

    lease_s: float = 8.0
    renew_deadline_s: float = 5.0
    retry_s: float = 1.0
    """Between looks and renewals: this long to twice as long, at random."""

    def __post_init__(self) -> None:
        if not 0 < 2 * self.retry_s < self.renew_deadline_s < self.lease_s:
            raise ValueError("a Lease needs 2 x retry_s < renew_deadline_s < lease_s, or it is lost for no reason")

    @classmethod
    def lasting(cls, lease_s: float) -> LeaseTiming:
        """With the proportions of the default. Raises ValueError for less than a second."""
        if not lease_s >= 1 or math.isinf(lease_s):
            raise ValueError(f"a Lease lasts for a second at least, not {lease_s:g}")
        return cls(lease_s, renew_deadline_s=lease_s * 5 / 8, retry_s=lease_s / 8)


class LeaseWatch:
    """What one candidate has seen of the Lease. Times are of one clock that never goes back, in seconds."""

    def __init__(self) -> None:
        self._record: tuple[Any, ...] | None = None
        self._seen_at = 0.0

    def free(self, lease: Object, now_s: float, lease_s: float) -> bool:
        """It may be taken: released, or unchanged for as long as its holder promised (else `lease_s`).

        Our own name in it is another's: of an earlier process, or of one that was given the same name by mistake.
        """
        spec: Mapping[str, Any] = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if not holder:
            return True
        record = (holder, spec.get("renewTime"), spec.get("acquireTime"), spec.get("leaseTransitions"))
        if record != self._record:
            self._record, self._seen_at = record, now_s
        return now_s - self._seen_at >= (spec.get("leaseDurationSeconds") or lease_s)


def new_lease(namespace: str, name: str, identity: str, timing: LeaseTiming, now: datetime) -> dict[str, Any]:
    return {
        "apiVersion": LEASES.api_version,
        "kind": LEASES.kind,
        "metadata": {"namespace": namespace, "name": name},
        "spec": _held(identity, timing, now) | {"acquireTime": micro_time(now), "leaseTransitions": 0},
    }


def taken(lease: Object, identity: str, timing: LeaseTiming, now: datetime) -> dict[str, Any]:
    """The Lease with us as its holder; its resourceVersion makes writing it fail if another was faster."""
    spec = dict(lease.get("spec") or {})
    transitions = int(spec.get("leaseTransitions") or 0) + 1
    spec |= _held(identity, timing, now) | {"acquireTime": micro_time(now), "leaseTransitions": transitions}
    return {**lease, "spec": spec}


def renewed(lease: Object, identity: str, timing: LeaseTiming, now: datetime) -> dict[str, Any]:
    return {**lease, "spec": {**lease["spec"], **_held(identity, timing, now)}}


def released(lease: Object, now: datetime) -> dict[str, Any]:
    """Free for anybody at once."""
    spec = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": micro_time(now)}
    return {**lease, "spec": spec}


def same_holding(held: Object, lease: Object) -> bool:
    """The Lease is still held by whom it was, without a break: two processes that were given one identity differ."""
    mine, theirs = held["spec"], lease.get("spec") or {}
    return all(mine.get(field) == theirs.get(field) for field in ("holderIdentity", "acquireTime"))


def _held(identity: str, timing: LeaseTiming, now: datetime) -> dict[str, Any]:
    return {
        "holderIdentity": identity,
        "leaseDurationSeconds": max(1, math.ceil(timing.lease_s)),
        "renewTime": micro_time(now),
    }


def micro_time(now: datetime) -> str:
    """For people who read it: nobody decides by it."""
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
