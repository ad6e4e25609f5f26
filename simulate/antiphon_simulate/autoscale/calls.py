"""The requests of a run, with what does not depend on the sizes of pools worked out once: what is cached, how long the
prompt takes alone, and whether anybody could serve it in time.

The cache is the ideal one (`ideal.ideal_cached_tokens`): what pools of workers that pull from each other come near to.
Traces without block ids have nothing cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon_simulate.autoscale.goal import Goal
from antiphon_simulate.ideal import ideal_cached_tokens
from antiphon_simulate.records import Timing, TraceRequest
from antiphon_simulate.setup import followers_of
from antiphon_simulate.worker import HOP_MS


@dataclass(frozen=True, slots=True)
class Call:
    """One request."""

    index: int
    arrival_ms: float
    prompt_tokens: int
    uncached_tokens: int
    output_tokens: int
    prefill_ms: float
    """Alone on an idle worker."""
    ttft_limit_ms: float
    feasible: bool
    """An idle worker could have served it inside the goal."""
    follows: bool = False
    """It comes after an answer (closed loop)."""
    think_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be served."""

    name: str
    calls: tuple[Call, ...]
    """By index; those that follow nothing are in the order in which they come."""
    followers: dict[int, tuple[int, ...]]
    """Index -> the calls that its end sets off."""
    day_ms: float = 86_400_000.0
    """After which it comes again, as far as it does."""

    @property
    def span_ms(self) -> float:
        """From 0 to the last arrival that the file knows."""
        return max((call.arrival_ms for call in self.calls), default=0.0)


def make_load(
    name: str, requests: Sequence[TraceRequest], timing: Timing, goal: Goal, *, day_ms: float = 86_400_000.0
) -> Load:
    """Raises `WorkloadError` where requests do not fit each other."""
    followers = followers_of(requests)
    calls = tuple(
        _call(request, cached, timing, goal)
        for request, cached in zip(requests, ideal_cached_tokens(requests), strict=True)
    )
    return Load(name, calls, {index: tuple(one.index for one in its) for index, its in followers.items()}, day_ms)


def _call(request: TraceRequest, cached_tokens: int, timing: Timing, goal: Goal) -> Call:
    cached = min(cached_tokens, request.prompt_tokens - 1)
    uncached = request.prompt_tokens - cached
    output = max(1, request.output_tokens)
    prefill_ms = timing.step.prefill_ms(new_tokens=uncached, cached_tokens=cached, chunk_tokens=timing.chunk_tokens)
    limit_ms = goal.ttft_limit_ms(uncached)
    # Contexts grow by one a step, so the middle one is the mean.
    context = request.prompt_tokens + 1 + (output - 1) // 2
    tpot_ms = timing.step.step_ms(new_tokens=1, token_context=context, sequences=1, kv_tokens=context)
    return Call(
        index=request.index,
        arrival_ms=request.arrival_ms,
        prompt_tokens=request.prompt_tokens,
        uncached_tokens=uncached,
        output_tokens=output,
        prefill_ms=prefill_ms,
        ttft_limit_ms=limit_ms,
        feasible=HOP_MS + prefill_ms <= limit_ms and (output == 1 or tpot_ms <= goal.tpot_ms),
        follows=request.after is not None,
        think_ms=request.think_ms,
    )
