"""Antiphon's own law, fed with what gateways and workers would tell the operator: `antiphon_policy.scaling.law`.

What it is given: the requests of the promise's window with what is known of them so far, the queues, the measured start
and drain times, arrivals by buckets, and its own memory. Decisions are kept with their inputs where somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from antiphon_policy.routing import WorkerRole
from antiphon_policy.scaling import (
    MOST_SAMPLES,
    ArrivalCounts,
    PoolView,
    RequestSample,
    ScalingDecision,
    ScalingInputs,
    ScalingMemory,
)
from antiphon_policy.scaling.law import decide

from antiphon_simulate.autoscale.records import PoolSeen, Seen, Serving, Setting, Sizes, Wish

WINDOW_S = 300.0
BUCKET_MS = 10_000.0
BUCKETS = 2 * 8640
"""Two days of them."""
UNKNOWN_OUTPUT_TOKENS = 128
"""Of answers, before any has ended."""


class Antiphon:
    name = "antiphon"

    def __init__(
        self,
        setting: Setting,
        *,
        interval_ms: float = 5_000.0,
        period_ms: float = 86_400_000.0,
        keep: Callable[[ScalingDecision], None] | None = None,
    ) -> None:
        self.interval_ms = interval_ms
        self._setting = setting
        self._promise = setting.goal.promise(WINDOW_S)
        self._period_ms = period_ms
        self._keep = keep
        self._memory = ScalingMemory()
        self._window: deque[Serving] = deque()
        self._counts: deque[float] = deque(maxlen=BUCKETS)
        self._bucket_end_ms = 0.0
        self._open: list[Serving] = []
        """Came after the last whole bucket."""

    def decide(self, seen: Seen) -> Wish:
        self._note(seen)
        site = self._setting.site
        decision = decide(
            ScalingInputs(
                now_ms=seen.now_ms,
                promise=self._promise,
                pools=(self._pool(seen.prefill), self._pool(seen.decode)),
                samples=self._samples(),
                news_age_ms=0.0,
                arrivals=ArrivalCounts(self._bucket_end_ms, BUCKET_MS, tuple(self._counts), self._period_ms),
                budget_devices=site.budget,
                may_switch=site.may_switch,
                memory=self._memory,
            )
        )
        self._memory = decision.memory
        if self._keep is not None:
            self._keep(decision)
        sizes = Sizes(decision.size_of(WorkerRole.PREFILL), decision.size_of(WorkerRole.DECODE))
        return Wish(sizes, decision.switch)

    def _note(self, seen: Seen) -> None:
        self._window.extend(seen.arrived)
        while self._window and self._window[0].arrived_ms < seen.now_ms - 1000.0 * WINDOW_S:
            self._window.popleft()
        self._open.extend(seen.arrived)
        while seen.now_ms >= self._bucket_end_ms + BUCKET_MS:
            self._bucket_end_ms += BUCKET_MS
            inside = [one for one in self._open if one.arrived_ms < self._bucket_end_ms]
            self._counts.append(float(len(inside)))
            self._open = self._open[len(inside) :]

    def _samples(self) -> tuple[RequestSample, ...]:
        """All, or evenly taken ones that stand for several."""
        window = self._window
        stride = -(-len(window) // MOST_SAMPLES) or 1
        # Nobody knows how long an answer will be that has not ended: it is taken to be like one that has.
        known = [one.call.output_tokens for one in window if one.ended_ms is not None] or [UNKNOWN_OUTPUT_TOKENS]
        return tuple(
            RequestSample(
                at_ms=one.arrived_ms,
                uncached_tokens=one.call.uncached_tokens,
                prompt_tokens=one.call.prompt_tokens,
                output_tokens=one.call.output_tokens if one.ended_ms is not None else known[at % len(known)],
                weight=float(stride),
                ttft_ms=one.ttft_ms,
                tpot_ms=one.tpot_ms,
            )
            for at, one in enumerate(list(window)[::stride])
        )

    def _pool(self, pool: PoolSeen) -> PoolView:
        setting = self._setting
        site, timing = setting.site, setting.timing
        is_prefill = pool.role is WorkerRole.PREFILL
        return PoolView(
            role=pool.role,
            size=pool.wanted,
            ready=pool.ready,
            starting_ms=pool.starting_ms,
            draining=pool.draining,
            floor=site.least.of(pool.role),
            ceiling=site.most.of(pool.role),
            step=timing.step,
            chunk_tokens=timing.chunk_tokens if is_prefill else timing.mixed_chunk_tokens,
            max_sequences=site.max_running,
            kv_capacity_tokens=site.kv_tokens,
            start_ms=pool.start_ms,
            drain_ms=pool.drain_ms,
            queued_tokens=pool.queued_tokens,
            queued_requests=pool.queued_requests,
            running=pool.running,
            kv_tokens=pool.kv_tokens,
            shape="simulated" if site.may_switch else "",
        )
