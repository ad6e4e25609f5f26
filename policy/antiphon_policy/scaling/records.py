"""What a scaling decision is made from, and what it says: the contract between those who measure, the law, and those
who act.

All are frozen structs that JSON can carry (msgspec), so that a decision can be written down with its inputs and be made
again elsewhere, to the same result. A limit that there is not is None and never infinite: JSON knows no infinity, and
the law cleans what it is given (`cleaning`) before it decides and before it writes its inputs down.

Times are milliseconds of one clock, the caller's; which one does not matter.
"""

from __future__ import annotations

import enum

import msgspec

from antiphon_policy.latency import CHUNK_TOKENS, StepModel
from antiphon_policy.route_records import WorkerRole

MOST_SAMPLES = 2000
"""Samples of a window; with more requests than that each stands for several (`RequestSample.weight`)."""


class TtftTarget(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of time to first token, from the request's arrival at the gateway. Its limit grows with what has to be computed,
    since no number of workers makes one long prompt faster."""

    base_ms: float
    per_thousand_tokens_ms: float = 0.0
    """For each thousand prompt tokens that had to be computed (uncached ones)."""
    percentile: float = 0.95
    """The share of the requests of a window that are to be inside; 0 < percentile < 1."""

    def limit_ms(self, uncached_tokens: int) -> float:
        """500 ms and 60 ms per thousand: 620 ms for 2,000 uncached tokens."""
        return self.base_ms + self.per_thousand_tokens_ms * uncached_tokens / 1000.0


class TpotTarget(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the mean time of an answer's tokens after the first."""

    limit_ms: float
    percentile: float = 0.95


class Promise(msgspec.Struct, frozen=True, omit_defaults=True):
    """None: nothing is promised about that latency. Percentiles are over the requests of the last `window_s`."""

    ttft: TtftTarget | None = None
    tpot: TpotTarget | None = None
    window_s: float = 300.0


class RequestSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request of the window. Written as an array: a decision holds many of them."""

    at_ms: float
    """When it came to the gateway."""
    uncached_tokens: int
    """Prompt tokens that were computed for it."""
    prompt_tokens: int
    output_tokens: int
    weight: float = 1.0
    """It stands for so many requests."""
    ttft_ms: float | None = None
    """As it was served; None: not known (yet)."""
    tpot_ms: float | None = None
    least_uncached_tokens: int | None = None
    """What a cache of everything sent before it would have left to compute; None: as `uncached_tokens`."""


class PoolView(msgspec.Struct, frozen=True, omit_defaults=True):
    """One pool as the caller knows it now."""

    role: WorkerRole
    size: int
    """Replicas wanted now, whoever said so: what ready and starting ones are to become."""
    ready: int
    starting_ms: tuple[float, ...] = ()
    """Of each worker that starts, the time until it is expected to be ready."""
    draining: int = 0
    floor: int = 1
    """0: the pool may sleep."""
    ceiling: int = 8
    step: StepModel = StepModel()
    chunk_tokens: int = CHUNK_TOKENS
    """Prompt tokens in one step of one of its workers."""
    max_sequences: int = 256
    """Answers that one worker decodes at once, at most."""
    kv_capacity_tokens: int = 1_000_000
    """Of one worker."""
    start_ms: float = 60_000.0
    """Measured: from asking for a worker until it is ready."""
    drain_ms: float = 30_000.0
    """Measured: from asking a worker to go until it is gone."""
    queued_tokens: int = 0
    """Prompt tokens, uncached ones, that wait or are being computed now: in the gateways and on the pool's workers."""
    queued_requests: int = 0
    """Requests that wait for a worker of this pool; in a pool that sleeps, those that gateways hold."""
    running: int = 0
    """Answers that its workers decode now."""
    kv_tokens: int = 0
    """Tokens that those answers' contexts have now."""
    devices: int = 1
    """Of one replica."""
    shape: str = ""
    """Pools with the same engine, parallel shape and image name it equally; empty: not known. Only between equals may
    a worker change its role."""
    edits: int = 0
    """How often someone else has set `size`: grows with every such edit."""


class ArrivalCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Requests that came, per bucket of time, oldest first; the last bucket ended at `end_ms`. Only whole buckets."""

    end_ms: float = 0.0
    bucket_ms: float = 10_000.0
    counts: tuple[float, ...] = ()
    period_ms: float = 86_400_000.0
    """After which load is expected to come again."""


class Wanted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """So many replicas were needed then."""

    at_ms: float
    size: int


class PoolMemory(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the law remembers of one pool."""

    role: WorkerRole
    since_ms: float | None = None
    """When it first saw the pool; None: never."""
    wanted: tuple[Wanted, ...] = ()
    """The peaks of what was needed: oldest first, and each smaller than the one before."""
    added_ms: float | None = None
    """When it last made the pool larger; None: never."""
    added_rps: float = 0.0
    """The load for which it did."""
    removed_ms: float | None = None
    removed_rps: float = 0.0
    """The load at which it last made it smaller."""
    relapses: int = 0
    """How often in a row it was made smaller and, at that load, soon larger again."""
    edits: int | None = None
    """`PoolView.edits` as of the last decision."""
    edited_ms: float | None = None
    """When an edit was last seen."""


class ScalingMemory(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that the law remembers between two decisions. The caller keeps it and gives it back; without it (a new
    operator) the law begins carefully, and nothing else is lost."""

    pools: tuple[PoolMemory, ...] = ()
    active_ms: float | None = None
    """When there last was any request; None: not known."""

    def of(self, role: WorkerRole) -> PoolMemory:
        return next((pool for pool in self.pools if pool.role is role), PoolMemory(role))


class ScalingInputs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything that a decision depends on."""

    now_ms: float
    promise: Promise
    pools: tuple[PoolView, ...]
    """A prefill and a decode pool, or one of both."""
    samples: tuple[RequestSample, ...] = ()
    """The requests that came in the last `promise.window_s`, oldest first; `MOST_SAMPLES` at most."""
    news_age_ms: float | None = 0.0
    """How old the newest word of the gateways is; None: there is none. An empty window with fresh news is a fact."""
    arrivals: ArrivalCounts = ArrivalCounts()
    budget_devices: int | None = None
    """That all pools may have together; None: no limit but the ceilings."""
    may_switch: bool = False
    """Workers can change their role here."""
    memory: ScalingMemory = ScalingMemory()


class ScalingAction(enum.Enum):
    NONE = "none"
    ADD = "add"
    REMOVE = "remove"
    SWITCH_ROLE = "switch_role"
    WAKE = "wake"
    TO_ZERO = "to_zero"
    FREEZE = "freeze"


class ScalingReason(enum.Enum):
    """Why. The sentence has the numbers."""

    ENOUGH = "enough"
    """The sizes keep the promise, and fewer would not, or not surely."""
    PROMISE_NOW = "promise_now"
    """The load of the window needs more."""
    PROMISE_AHEAD = "promise_ahead"
    """By the forecast, the load will need more by the time that a worker has started."""
    QUEUE = "queue"
    """What is queued or running now needs more."""
    SERVED_LATE = "served_late"
    """More were served late at this size than may be, though by the replays they should not have been."""
    OTHER_POOL_HAS_SPARE = "other_pool_has_spare"
    """A worker of the other pool changes its role: sooner than a new one."""
    SPARE = "spare"
    """The survivors keep the promise."""
    IDLE = "idle"
    """No requests: to the floor."""
    REQUESTS_WAIT = "requests_wait"
    """A pool that slept has work."""
    COOLING_DOWN = "cooling_down"
    """Fewer would do, but it was made larger lately."""
    HAND_EDIT = "hand_edit"
    """Someone else set a size lately: it is left alone."""
    LIMITED = "limited"
    """More is needed than ceilings or budget allow; it has what they allow."""
    BOUNDS = "bounds"
    """The size was outside its bounds."""
    NO_NEWS = "no_news"
    """Nothing or nothing new is known: nothing but the bounds counts."""
    NO_PROMISE = "no_promise"


class PoolSize(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one pool is to have, and what it was derived from."""

    role: WorkerRole
    size: int
    """Replicas wanted from now on."""
    before: int
    needed: int = 0
    """Before bounds, budget and patience: the most of the four below."""
    needed_now: int = 0
    """For the window's requests at the middle of what is foreseen; as they came, where nothing is."""
    needed_ahead: int = 0
    """For all that may come, each as often as past errors say."""
    needed_queue: int = 0
    """For what is queued or running now."""
    needed_seen: int = 0
    """Where more were served late than should have been; else 0."""


class RoleSwitch(msgspec.Struct, frozen=True):
    """So many workers change their role. The sizes of the decision are those after it."""

    from_role: WorkerRole
    to_role: WorkerRole
    count: int


class Prediction(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the window says, and what is predicted of it at the sizes decided on."""

    rps: float = 0.0
    """Requests per second of the window."""
    rps_ahead: float = 0.0
    """Foreseen, with the error band."""
    attainment_ttft: float | None = None
    """Of the feasible requests, the share that is inside, by replay at the decided sizes and the middle of what is
    foreseen; None: nothing to say."""
    attainment_tpot: float | None = None
    infeasible_share: float = 0.0
    """Of all requests: those that an idle worker with a perfect cache could not have served in time."""
    observed_attainment: float | None = None
    """Of the feasible requests whose latencies were measured, those inside both limits."""


class ScalingDecision(msgspec.Struct, frozen=True, omit_defaults=True):
    at_ms: float
    sizes: tuple[PoolSize, ...]
    """One for each pool of the inputs, in their order."""
    action: ScalingAction
    reason: ScalingReason
    sentence: str
    """Why, with the numbers, for a person to check."""
    memory: ScalingMemory
    """To be given back with the next inputs."""
    prediction: Prediction = Prediction()
    switch: RoleSwitch | None = None
    inputs: ScalingInputs | None = None
    """As the law saw them (cleaned): `law.decide` makes the same decision of them again."""

    def size_of(self, role: WorkerRole) -> int:
        return next(pool.size for pool in self.sizes if pool.role is role)
