"""What the parts of the scaling simulator hand to each other. Times are milliseconds from the start of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from antiphon_policy.routing import WorkerRole
from antiphon_policy.scaling import RoleSwitch

from antiphon_simulate.autoscale.calls import Call
from antiphon_simulate.autoscale.goal import Goal
from antiphon_simulate.records import Timing

POOLS = (WorkerRole.PREFILL, WorkerRole.DECODE)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Replicas of each pool."""

    prefill: int
    decode: int

    def of(self, role: WorkerRole) -> int:
        return self.prefill if role is WorkerRole.PREFILL else self.decode

    @property
    def total(self) -> int:
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class Site:
    """What workers do besides computing. The times are examples of what is measured on a cluster: give your own."""

    start_ms: float = 60_000.0
    """From asking for a worker until it serves."""
    start_spread: float = 0.2
    """Each start is drawn evenly within this share of it."""
    drain_ms: float = 30_000.0
    """A worker that is to go lets its streams end for so long; those that are left then move to others."""
    switch_ms: float = 5_000.0
    """A drained worker takes up the other role in this time."""
    mean_life_h: float = 0.0
    """Workers fail after so long in the mean, at random; 0: never."""
    least: Sizes = Sizes(1, 1)
    most: Sizes = Sizes(16, 16)
    budget: int | None = None
    """GPUs that both pools may have together."""
    max_running: int = 256
    kv_tokens: int = 1024 * 512
    """Of one worker."""
    may_switch: bool = True

    @property
    def longest_start_ms(self) -> float:
        return self.start_ms * (1.0 + self.start_spread)

    @property
    def shortest_start_ms(self) -> float:
        return self.start_ms * (1.0 - self.start_spread)


@dataclass(slots=True, eq=False)
class Serving:
    """A request on its way. `prompt_tokens` and `output_tokens` are of what is left to do: a stream that moved has its
    tokens so far in its context."""

    call: Call
    prompt_tokens: int
    output_tokens: int
    uncached_tokens: int
    arrived_ms: float
    first_ms: float | None = None
    ended_ms: float | None = None
    moves: int = 0

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_ms is None else self.first_ms - self.arrived_ms

    @property
    def tpot_ms(self) -> float | None:
        """0 for an answer of one token; None: it has not ended."""
        if self.ended_ms is None or self.first_ms is None:
            return None
        more = self.call.output_tokens - 1
        return (self.ended_ms - self.first_ms) / more if more else 0.0

    def is_inside(self, goal: Goal) -> bool:
        ttft_ms, tpot_ms = self.ttft_ms, self.tpot_ms
        return (
            ttft_ms is not None
            and ttft_ms <= self.call.ttft_limit_ms
            and tpot_ms is not None
            and tpot_ms <= goal.tpot_ms
        )


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """One pool as those who decide know it."""

    role: WorkerRole
    wanted: int
    ready: int
    starting_ms: tuple[float, ...]
    """Of each worker that starts, until it is expected to be ready."""
    draining: int
    queued_requests: int
    """That wait for a worker of this pool or have their prompt computed by one."""
    queued_tokens: int
    """Their uncached prompt tokens."""
    running: int
    kv_tokens: int
    start_ms: float = 60_000.0
    """As measured: the mean of the last starts; before there were any, what the site says."""
    drain_ms: float = 30_000.0
    """The same, from asking a worker to go until it is gone."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What gateways and workers have told since the last decision."""

    now_ms: float
    since_ms: float
    prefill: PoolSeen
    decode: PoolSeen
    arrived: Sequence[Serving]
    first_tokens: Sequence[Serving]
    """Whose first token came."""
    ended: Sequence[Serving]

    @property
    def pools(self) -> tuple[PoolSeen, PoolSeen]:
        return self.prefill, self.decode


@dataclass(frozen=True, slots=True)
class Wish:
    """What one who decides wants from now on."""

    sizes: Sizes
    switch: RoleSwitch | None = None
    """Workers that are to change their role; `sizes` are those after it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What one who decides knows beforehand: the same for all."""

    timing: Timing
    goal: Goal
    site: Site


class Scaler(Protocol):
    """One who decides about sizes. One object lives through one run."""

    name: str
    interval_ms: float
    """It is asked so often."""

    def decide(self, seen: Seen) -> Wish: ...


@dataclass(frozen=True, slots=True)
class Moment:
    """The cluster at one time, for plots and figures."""

    at_ms: float
    wanted: Sizes
    ready: Sizes
    alive: Sizes
    """All that are paid for: starting, ready, draining, switching."""


@dataclass(frozen=True, slots=True)
class ScaleRun:
    """What became of one load under one scaler."""

    scaler: str
    servings: Sequence[Serving]
    moments: Sequence[Moment]
    """At each change of anything, in order."""
    span_ms: float
    """What is paid for: from 0 to the last arrival."""
    starts: int
    switches: int
    failures: int
    moved_streams: int
    took_s: float = field(default=0.0, compare=False)
