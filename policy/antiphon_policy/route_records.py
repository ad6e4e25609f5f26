"""What a routing decision is made from, and what it says. Plain frozen records; times in milliseconds.

Those that every decision makes many of are msgspec's: a frozen dataclass of nine fields takes 3 us to make, and such a
struct a tenth of one.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from antiphon_policy.latency import CHUNK_TOKENS, StepModel


class WorkerRole(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class WorkerView(msgspec.Struct, frozen=True, gc=False):
    """One worker as the caller knows it now. Figures that are not known are 0."""

    worker_id: str
    role: WorkerRole
    leading_blocks: int
    """Leading full blocks of this request's chain that it holds. (A `WorkerTable` is told apart from its views.)"""
    queued_tokens: int
    """Prompt tokens it still has to compute, with what was just routed to it."""
    running: int
    kv_tokens: int
    free_blocks: int
    """Free or evictable."""
    total_blocks: int
    """0: not known."""
    step: StepModel
    draining: bool = False
    may_decode: bool = True
    """False: it takes no further answer now, whatever its role; it may still compute prompts for others."""
    empty_blocks: int = 0
    """Blocks with nothing in them: so many can be stored without evicting any."""
    chunk_tokens: int = CHUNK_TOKENS
    """Prompt tokens in one of its steps."""


class Workload(msgspec.Struct, frozen=True, gc=False):
    """What the requests of late were like, as the caller measured it: means that fade. It is what makes `delay` and
    `recompute` figures instead of weights."""

    uncached_tokens: float = 512.0
    """Prompt tokens of a request that had to be computed."""
    output_tokens: float = 128.0
    """Tokens of an answer."""
    short_output_tokens: float = 128.0
    """Of an answer that is shorter than nine of ten: what a stall of a worker is spread over at worst."""
    waiting_tokens: float = 0.0
    """Uncached prompt tokens that wait in gateways for one worker that computes prompts, on the average."""
    ttft_limit_ms: float | None = None
    """What the requests are promised, on the average; None: nothing."""
    evicted_reuse: float = 0.0
    """Of the blocks that are evicted, the share that is asked for again (see `antiphon_kvtransfer.mirror`)."""


class RouteRequest(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int
    block_tokens: int
    block_bytes: int
    max_tokens: int
    ttft_limit_ms: float | None = None
    """What is left of its promise: the limit less what it has waited. None: none was made."""
    tpot_limit_ms: float | None = None
    hint: tuple[str, str] | None = None
    """(decode, prefill or "") of the session's last request: wins where it is as good as the cheapest."""


@dataclass(frozen=True, slots=True)
class RoutingSnapshot:
    workers: tuple[WorkerView, ...]
    link_gigabytes_per_s: Mapping[tuple[str, str], float]
    """(reader, holder) -> measured speed. A missing or 0 entry: not measured."""
    workload: Workload = field(default_factory=Workload)


class RouteReason(enum.Enum):
    """Why the prompt is computed where it is."""

    PREFILL_REMOTE = "prefill_remote"
    """A prefill worker is the cheapest."""
    LOCAL_CHEAPER = "local_cheaper"
    """There are prefill workers, but the decode worker itself is cheaper (it holds most of it, or they are busy)."""
    LOCAL_NO_PREFILL_WORKER = "local_no_prefill_worker"
    ROUND_ROBIN = "round_robin"
    """It was their turn: the caller was told to route so (nothing here decides it)."""


class NoWorkerReason(enum.Enum):
    NO_WORKERS = "no_workers"
    NO_DECODE_WORKER = "no_decode_worker"
    ALL_DRAINING = "all_draining"


class NoWorker(Exception):
    """Nobody can take the request now."""

    def __init__(self, reason: NoWorkerReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class CostParts(msgspec.Struct, frozen=True, gc=False):
    """The terms of the formula of `antiphon_policy.routing`, in milliseconds."""

    queue_ms: float
    pull_ms: float
    compute_ms: float
    transfer_ms: float
    join_ms: float
    delay_ms: float
    recompute_ms: float
    hop_ms: float = 0.0
    stream_ms: float = 0.0

    @property
    def ttft_ms(self) -> float:
        return self.hop_ms + self.queue_ms + self.pull_ms + self.compute_ms

    @property
    def total_ms(self) -> float:
        ttft_ms = self.hop_ms + self.queue_ms + self.pull_ms + self.compute_ms
        return ttft_ms + self.transfer_ms + self.join_ms + self.stream_ms + self.delay_ms + self.recompute_ms


class RouteOption(msgspec.Struct, frozen=True, gc=False):
    """One priced pair. `prefill` None: on the decode worker."""

    decode: str
    prefill: str | None
    cost: CostParts
    tpot_ms: float = 0.0
    """Predicted milliseconds for each token after the first."""
    keeps_sla: bool = True
    """By prediction: its own promise, and that of the answers that run on the decode worker. True without an SLA."""

    @property
    def cost_ms(self) -> float:
        return self.cost.total_ms


class RouteDecision(msgspec.Struct, frozen=True, gc=False):
    decode: str
    prefill: str | None
    """None: prefill on the decode worker."""
    prefill_fallbacks: tuple[str, ...]
    """Other prefill workers, best first."""
    prefix_peers: tuple[tuple[str, int], ...]
    """(holder, leading blocks it holds): from whom the prefiller had better pull than compute, best first."""
    predicted_ttft_ms: float
    reason: RouteReason
    alternatives: tuple[RouteOption, ...] = ()
    """The next best pairs that were not taken."""
    cost: CostParts | None = None
    predicted_tpot_ms: float = 0.0
    keeps_sla: bool = True
    prefill_blocks: int = 0
    """Leading blocks that the prefiller holds itself."""
    decode_blocks: int = 0
    usable_blocks: int = 0
    """Blocks of the prompt that can be reused: a full hit still computes the last token."""

    @property
    def explanation(self) -> str:
        """In a sentence. Made when asked for: most decisions are never read."""
        where = f"prefill on {self.prefill}" if self.prefill else "prefill on the same worker"
        text = f"decode on {self.decode}, {where}"
        if self.cost is not None:
            cost = self.cost
            text += (
                f": {cost.total_ms:.1f} ms = first token {cost.ttft_ms:.1f}"
                f" (queue {cost.queue_ms:.1f}, pull {cost.pull_ms:.1f}, compute {cost.compute_ms:.1f})"
                f" + transfer {cost.transfer_ms:.1f} + join {cost.join_ms:.1f} + stream {cost.stream_ms:.1f}"
                f" + delay to others {cost.delay_ms:.1f} + recompute {cost.recompute_ms:.1f}"
            )
        text += f"; cached blocks {self.prefill_blocks} (prefill) {self.decode_blocks} (decode) of {self.usable_blocks}"
        if self.alternatives:
            other = self.alternatives[0]
            text += f"; next: {other.decode}, prefill on {other.prefill or 'the same worker'}, {other.cost_ms:.1f} ms"
        return text if self.keeps_sla else f"{text}; no pair keeps the SLA"
