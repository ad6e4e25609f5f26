"""llm-d's SLO-driven law: how near the slow requests come to their limits.

    raw = P90 latency of the last minute / limit        prefill: TTFT, decode: TPOT; nothing known: 0
    s   = mean over 45 s of min(raw, 2)                  looked at every 15 s

    up    n + ceil(n * (s * ready / n / 0.55 - 1))       if s > 0.55; what starts is credited
    down  n - floor(n * (1 - s / 0.40))                  if s < 0.40
    else  n

Then what the HPA that carries it out makes of it. Up: the least advice of 30 s, and in 60 s at most to the double or by
four, whichever is more. Down: the highest advice of 180 s, and one worker in 120 s.

Source: llm-d, guides/workload-autoscaling/README.slo-aware.md (control law, tunables). Its scope is one pool with the
larger of both terms; for two pools it names these terms as what would drive each.
"""

from __future__ import annotations

import math
from collections import deque

from antiphon_policy.routing import WorkerRole

from antiphon_simulate.autoscale.records import POOLS, PoolSeen, Seen, Setting, Sizes, Wish

UP = 0.55
DOWN = 0.40
QUANTILE = 0.90
MOST_RAW = 2.0
INTERVAL_MS = 15_000.0
WINDOW_MS = 60_000.0
SMOOTHED_SAMPLES = 3
"""45 s of them."""
UP_WINDOW_MS, UP_PERIOD_MS, UP_WORKERS = 30_000.0, 60_000.0, 4
DOWN_WINDOW_MS, DOWN_PERIOD_MS = 180_000.0, 120_000.0


class LlmD:
    name = "llm_d"
    interval_ms = INTERVAL_MS

    def __init__(self, setting: Setting) -> None:
        self._goal = setting.goal
        self._pools = {role: _Pool() for role in POOLS}

    def decide(self, seen: Seen) -> Wish:
        prefill, decode = self._pools[WorkerRole.PREFILL], self._pools[WorkerRole.DECODE]
        for serving in seen.first_tokens:
            prefill.ratios.append((seen.now_ms, (serving.ttft_ms or 0.0) / serving.call.ttft_limit_ms))
        for serving in seen.ended:
            if serving.call.output_tokens > 1:
                decode.ratios.append((seen.now_ms, (serving.tpot_ms or 0.0) / self._goal.tpot_ms))
        return Wish(Sizes(*(self._pools[pool.role].size(pool, seen.now_ms) for pool in seen.pools)))


class _Pool:
    def __init__(self) -> None:
        self.ratios: deque[tuple[float, float]] = deque()
        """(when it was told, latency over limit)."""
        self._raw: deque[float] = deque(maxlen=SMOOTHED_SAMPLES)
        self._advised: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()

    def size(self, pool: PoolSeen, now_ms: float) -> int:
        advised, changes = self._advised, self._changes
        advised.append((now_ms, self._desired(pool, now_ms)))
        while advised[0][0] < now_ms - DOWN_WINDOW_MS:
            advised.popleft()
        while changes and changes[0][0] <= now_ms - DOWN_PERIOD_MS:
            changes.popleft()
        up = min(size for at_ms, size in advised if at_ms >= now_ms - UP_WINDOW_MS)
        down = max(size for _, size in advised)
        size = pool.wanted
        if up > size:
            added = sum(by for at_ms, by in changes if by > 0 and at_ms > now_ms - UP_PERIOD_MS)
            began = size - added
            size = max(size, min(up, max(2 * began, began + UP_WORKERS)))
        elif down < size and not any(by < 0 for _, by in changes):
            size = max(1, size - 1)
        if size != pool.wanted:
            changes.append((now_ms, size - pool.wanted))
        return size

    def _desired(self, pool: PoolSeen, now_ms: float) -> int:
        ratios = self.ratios
        while ratios and ratios[0][0] < now_ms - WINDOW_MS:
            ratios.popleft()
        self._raw.append(min(MOST_RAW, _quantile([ratio for _, ratio in ratios])))
        saturation = sum(self._raw) / len(self._raw)
        size = pool.wanted
        if saturation > UP:
            credit = pool.ready / size if 0 < pool.ready < size else 1.0
            return size + math.ceil(size * (saturation * credit / UP - 1.0))
        if saturation < DOWN:
            return size - math.floor(size * (1.0 - saturation / DOWN))
        return size


def _quantile(values: list[float]) -> float:
    """0 where there are none: an idle pool."""
    return sorted(values)[min(len(values) - 1, int(QUANTILE * len(values)))] if values else 0.0
