"""What requests were like of late, learnt from those that start and end: the figures of `Workload`.

Means that fade: the last `MEAN_OF` requests or so count. The short answer is a quantile, followed without keeping any:
it goes up a little with each longer answer and down nine times as much with each shorter one, so it rests where one of
ten is shorter. Pure; the caller keeps one for each group of workers that share requests.
"""

from __future__ import annotations

from antiphon_policy.route_records import Workload

MEAN_OF = 50.0


class WorkloadMeter:
    """See the module."""

    def __init__(self) -> None:
        known = Workload()
        self._uncached_tokens = known.uncached_tokens
        self._output_tokens = known.output_tokens
        self._short_output_tokens = known.short_output_tokens

    @property
    def uncached_tokens(self) -> float:
        """Prompt tokens of a request that had to be computed, on the average."""
        return self._uncached_tokens

    def started(self, uncached_tokens: int) -> None:
        """A request was given to workers, that many of its prompt tokens to be computed."""
        self._uncached_tokens += (uncached_tokens - self._uncached_tokens) / MEAN_OF

    def ended(self, output_tokens: int) -> None:
        """An answer is complete."""
        self._output_tokens += (output_tokens - self._output_tokens) / MEAN_OF
        step = self._output_tokens / MEAN_OF
        change = 0.1 * step if output_tokens > self._short_output_tokens else -0.9 * step
        self._short_output_tokens = max(1.0, self._short_output_tokens + change)

    def workload(
        self, *, waiting_tokens: float = 0.0, ttft_limit_ms: float | None = None, evicted_reuse: float = 0.0
    ) -> Workload:
        """As of now, with what the caller knows of the moment (see `Workload`)."""
        return Workload(
            uncached_tokens=self._uncached_tokens,
            output_tokens=self._output_tokens,
            short_output_tokens=self._short_output_tokens,
            waiting_tokens=waiting_tokens,
            ttft_limit_ms=ttft_limit_ms,
            evicted_reuse=evicted_reuse,
        )
