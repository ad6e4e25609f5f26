"""What the parts of the simulator hand to each other. Plain records and one protocol; times are milliseconds from the
start of the run, blocks are those of the trace (512 tokens where its files say nothing else).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from antiphon_policy.latency import StepModel
from antiphon_policy.routing import WorkerRole
from antiphon_policy.sharing import Kept


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One row of a trace."""

    index: int
    """Its place in the trace: 0, 1, ..."""
    arrival_ms: float
    """Open loop: when it comes. Closed loop (`after`): the earliest time."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """One id for each block of the prompt; an id stands for the block and all before it. The last may be partial."""
    session: str = ""
    after: int | None = None
    """Index of the request whose answer its client waits for, then thinks for `think_ms`."""
    think_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Sla:
    """A promise for each request. A TTFT target that grows with the prompt, since no number of workers makes one long
    prompt faster. `math.inf` for both limits: nothing is promised."""

    ttft_ms: float = 1000.0
    ttft_ms_per_1k_prompt_tokens: float = 150.0
    tpot_ms: float = 50.0
    """Mean over the answer's tokens after the first."""

    def ttft_limit_ms(self, prompt_tokens: int) -> float:
        return self.ttft_ms + self.ttft_ms_per_1k_prompt_tokens * prompt_tokens / 1000.0


@dataclass(frozen=True, slots=True)
class Timing:
    """What a worker and a link are. Figures of GPUs are inputs that a person gives, never results."""

    step: StepModel
    chunk_tokens: int = 2048
    """Prompt tokens in one step of a prefill worker."""
    mixed_chunk_tokens: int = 512
    """The same of a worker that decodes: each such step is a pause for its answers."""
    block_bytes: int = 512 * 131072
    """KV bytes of one block of the trace."""
    link_gigabytes_per_s: float = 25.0
    name: str = ""
    source: str = ""
    """Where the figures come from, in a sentence."""


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """`decode` 0: aggregated serving, all workers are of role both."""

    prefill: int
    decode: int
    pool_blocks: int
    """Blocks of each worker's pool."""
    max_running: int = 256
    """Sequences that decode at once on a worker."""
    slow: Mapping[str, float] = field(default_factory=dict)
    """Worker id -> how many times slower its steps are than the timing says."""


@dataclass(slots=True, eq=False)
class WorkerState:
    """One worker as a gateway knows it: from the worker's last report, with what was routed to it since. Live: the
    cluster keeps it true; policies only read. `leading_blocks` comes beside it, per request."""

    worker_id: str
    role: WorkerRole
    step: StepModel
    """As the worker has fitted it; that of a slow worker is slow."""
    total_blocks: int
    queued_tokens: int = 0
    """Prompt tokens still to compute, uncached ones only, with what was just routed here."""
    queued_requests: int = 0
    running: int = 0
    """Sequences decoding, with those that were just routed here to decode."""
    kv_tokens: int = 0
    free_blocks: int = 0
    """Free or evictable."""


@dataclass(frozen=True, slots=True)
class Placement:
    decode: str
    prefill: str | None = None
    """None: the prompt is computed on the decode worker."""
    pull_from: str = ""
    """A worker with a longer prefix than the prefiller, to pull it from; empty: none."""
    predicted_ttft_ms: float | None = None
    predicted_tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request at the gateway."""

    request: TraceRequest
    arrived_ms: float
    draw: float
    """In [0, 1): the only randomness a policy gets."""


class ClusterView(Protocol):
    """What a policy may look at: what a gateway knows."""

    workers: Sequence[WorkerState]
    """Live records, in a fixed order."""
    timing: Timing
    block_tokens: int
    sla: Sla
    number: int
    """The gateway's."""

    @property
    def kept_back(self) -> Mapping[str, Mapping[str, tuple[Kept, float]]]:
        """By worker, what gateways have told it that they keep back, and when (`antiphon_policy.sharing`)."""

    @property
    def is_shared(self) -> bool:
        """Whether there are other gateways."""

    def tell(self, worker_id: str, kept: Kept) -> None:
        """The worker hears that the gateway keeps so much back; its reports say it."""

    def look_at(self, time_ms: float) -> None:
        """`dispatch` is asked then, whatever happens."""

    def leading_blocks(self, request: TraceRequest) -> Mapping[str, int]:
        """Worker id -> leading blocks of the prompt that it holds, by the gateway's mirror; only those with some."""

    def evicted(self) -> Sequence[int]:
        """Blocks that left the last worker that held them since the last call (see `policies.antiphon`)."""


class Policy(Protocol):
    """Chooses, and keeps what waits. One object lives through one run. (`policies.immediate.ImmediatePolicy` is for
    those that keep nothing back.)"""

    name: str

    def begin(self, cluster: ClusterView) -> None:
        """The run begins."""

    def arrived(self, arrival: Arrival) -> None:
        """One more request. `dispatch` follows."""

    def dispatch(self, now_ms: float) -> Iterable[tuple[TraceRequest, Placement]]:
        """What is to start now. Asked after arrivals and whenever a worker reported; what does not come out waits. Each
        placement is counted into the workers' states before the next is asked for: make it a generator."""

    def ended(self, request: TraceRequest, placement: Placement, now_ms: float) -> None:
        """A request that it placed has been answered to the end."""


@runtime_checkable
class Schedule(Protocol):
    """No policy but a whole schedule of its own, to compare policies with: `simulate` lets it run by itself."""

    name: str

    def run(
        self,
        requests: Sequence[TraceRequest],
        shape: ClusterShape,
        timing: Timing,
        sla: Sla,
        *,
        window_ms: float,
        until_ms: float | None,
        block_tokens: int,
    ) -> RunResult:
        """As `simulate` says."""


class Ending(enum.Enum):
    COMPLETE = "complete"
    UNFINISHED = "unfinished"
    """The run was cut while it waited or ran."""


@dataclass(slots=True)
class Outcome:
    """What became of one request."""

    request: TraceRequest
    arrived_ms: float
    placement: Placement | None = None
    placed_ms: float = 0.0
    first_token_ms: float = 0.0
    ended_ms: float = 0.0
    computed_tokens: int = 0
    """Prompt tokens that were computed, with what was computed twice."""
    pulled_blocks: int = 0
    """By the prefiller, from a peer."""
    moved_blocks: int = 0
    """From the prefiller to the decode worker."""
    ending: Ending = Ending.UNFINISHED

    @property
    def ttft_ms(self) -> float:
        return self.first_token_ms - self.arrived_ms

    @property
    def tpot_ms(self) -> float:
        """0 for an answer of one token."""
        more = self.request.output_tokens - 1
        return (self.ended_ms - self.first_token_ms) / more if more > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """One policy on one workload."""

    policy: str
    outcomes: Sequence[Outcome]
    busy_ms: Mapping[str, Sequence[float]]
    """Worker id -> milliseconds it was busy in each window of `window_ms`."""
    window_ms: float
    span_ms: float
    """From the first arrival to the last."""
    sla: Sla
