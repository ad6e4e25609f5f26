"""Kubernetes' Horizontal Pod Autoscaler on concurrency: requests in each pool per ready worker, against a target.

    ratio   = requests / (ready workers * target)
    desired = ceil(ready workers * ratio)        unless |ratio - 1| <= 0.1

Requests are the mean of the last 15 s, as a metrics pipeline would tell them: a prefill pool's line at one instant says
little. Workers that still start count as idle when it would grow, so that it does not order twice. It grows by at most
four workers or to the double in 15 s, whichever is more; it shrinks to the highest of its recommendations of 300 s.
"""

from __future__ import annotations

import math
from collections import deque

from antiphon_policy.routing import WorkerRole

from antiphon_simulate.autoscale.capacity import Profile
from antiphon_simulate.autoscale.records import POOLS, PoolSeen, Seen, Sizes, Wish

TOLERANCE = 0.1
SYNC_MS = 15_000.0
SAMPLE_MS = 1_000.0
STABILISATION_MS = 300_000.0
GROWTH_WORKERS = 4
USED_SHARE = 0.8
"""Of what a worker can have at once within the promise: the target."""


class Hpa:
    name = "hpa"
    interval_ms = SAMPLE_MS

    def __init__(self, profile: Profile) -> None:
        """Its target for answers comes from a profile of one worker on this load: more than its users mostly know."""
        # A worker computes one prompt at a time: more in each than it is busy are in line already.
        self._targets = {
            WorkerRole.PREFILL: USED_SHARE,
            WorkerRole.DECODE: max(1.0, USED_SHARE * profile.batch),
        }
        self._advised: dict[WorkerRole, deque[tuple[float, int]]] = {role: deque() for role in POOLS}
        self._samples: dict[WorkerRole, list[int]] = {role: [] for role in POOLS}
        self._synced_ms: float | None = None

    def decide(self, seen: Seen) -> Wish:
        for pool in seen.pools:
            self._samples[pool.role].append(pool.queued_requests + pool.running)
        if self._synced_ms is not None and seen.now_ms - self._synced_ms < SYNC_MS:
            return Wish(Sizes(seen.prefill.wanted, seen.decode.wanted))
        self._synced_ms = seen.now_ms
        return Wish(Sizes(*(self._stable(pool, seen.now_ms) for pool in seen.pools)))

    def _stable(self, pool: PoolSeen, now_ms: float) -> int:
        advised = self._advised[pool.role]
        desired = self._desired(pool)
        advised.append((now_ms, desired))
        while advised[0][0] < now_ms - STABILISATION_MS:
            advised.popleft()
        if desired >= pool.wanted:
            return min(desired, max(pool.wanted + GROWTH_WORKERS, 2 * pool.wanted))
        return min(pool.wanted, max(size for _, size in advised))

    def _desired(self, pool: PoolSeen) -> int:
        samples, target = self._samples[pool.role], self._targets[pool.role]
        requests = sum(samples) / len(samples)
        samples.clear()
        if not pool.ready:
            return max(pool.wanted, 1)
        ratio = requests / (pool.ready * target)
        if ratio > 1.0 + TOLERANCE:
            ratio = requests / (pool.wanted * target)  # those that start count, as idle
            return math.ceil(pool.wanted * ratio) if ratio > 1.0 + TOLERANCE else pool.wanted
        return math.ceil(pool.ready * ratio) if ratio < 1.0 - TOLERANCE else pool.wanted
