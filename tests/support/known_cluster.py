"""What a policy sees, written down by hand: workers in a given state, and who holds how much of any prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from antiphon_policy.latency import StepModel
from antiphon_policy.routing import WorkerRole
from antiphon_simulate.records import Arrival, Placement, Policy, Sla, Timing, TraceRequest, WorkerState

BLOCK_TOKENS = 100


def worker(
    worker_id: str,
    role: WorkerRole = WorkerRole.PREFILL,
    *,
    queued_tokens: int = 0,
    queued_requests: int = 0,
    running: int = 0,
    kv_tokens: int = 0,
    free_blocks: int = 1000,
) -> WorkerState:
    return WorkerState(
        worker_id,
        role,
        StepModel(),
        total_blocks=1000,
        queued_tokens=queued_tokens,
        queued_requests=queued_requests,
        running=running,
        kv_tokens=kv_tokens,
        free_blocks=free_blocks,
    )


def decoder(worker_id: str, *, running: int = 0, kv_tokens: int = 0, free_blocks: int = 1000) -> WorkerState:
    return worker(worker_id, WorkerRole.DECODE, running=running, kv_tokens=kv_tokens, free_blocks=free_blocks)


def prompt(blocks: Sequence[int], *, index: int = 0, output_tokens: int = 10) -> TraceRequest:
    return TraceRequest(index, 0.0, BLOCK_TOKENS * len(blocks), output_tokens, tuple(blocks))


class KnownCluster:
    """A `ClusterView`."""

    def __init__(self, *workers: WorkerState, held: Mapping[str, int] | None = None) -> None:
        self.workers = workers
        self.timing = Timing(StepModel())
        self.block_tokens = BLOCK_TOKENS
        self.sla = Sla()
        self.held = dict(held or {})
        """Worker id -> leading blocks, of every prompt."""

    def leading_blocks(self, request: TraceRequest) -> Mapping[str, int]:
        return self.held

    def evicted(self) -> Sequence[int]:
        return ()


def placed(policy: Policy, request: TraceRequest, *, draw: float = 0.0, now_ms: float = 0.0) -> Placement:
    """Where the policy, which has begun, sends this one."""
    policy.arrived(Arrival(request, now_ms, draw))
    ((_, placement),) = policy.dispatch(now_ms)
    return placement
