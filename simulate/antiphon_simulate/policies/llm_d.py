"""llm-d: a weighted sum of three scores between 0 and 1.

    score(w) = 3 * prefix(w) + 2 * queue(w) + 2 * memory(w)            (the greatest wins)
    prefix(w) = leading blocks of the prompt that w holds / blocks of the prompt
    queue(w)  = (longest - waiting(w)) / (longest - shortest), over all candidates; 1 where all are equal
    memory(w) = 1 - blocks in use on w / blocks of w

Source: llm-d-router, `pkg/epp/config/loader/defaults.go` (the profile where none is configured: queue-scorer 2,
kv-cache-utilization-scorer 2, prefix-cache-scorer 3) and the README of each scorer. Setting: the weight of the prefix
score. Two pools use the same profile on each side.

Unlike there: prefixes are those of the mirror, not guessed from what was routed (the `precise` variant of the scorer);
queues are known at once, not scraped; "waiting" counts the prompt that is being computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon_simulate.policies.sided import Draws, SidedPolicy, cheapest
from antiphon_simulate.records import TraceRequest, WorkerState

PREFIX_WEIGHT = 3.0
QUEUE_WEIGHT = 2.0
MEMORY_WEIGHT = 2.0


class LlmDPolicy(SidedPolicy):
    name = "llm_d"
    default = PREFIX_WEIGHT
    sweep = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0)

    def __init__(self, prefix_weight: float = PREFIX_WEIGHT) -> None:
        super().__init__()
        self._prefix_weight = prefix_weight

    def choose_prefill(
        self, request: TraceRequest, workers: Sequence[WorkerState], now_ms: float, numbers: Draws
    ) -> WorkerState:
        held = self.cluster.leading_blocks(request)
        waiting = [worker.queued_requests for worker in workers]
        longest, shortest = max(waiting), min(waiting)

        def score(worker: WorkerState) -> float:
            prefix = held.get(worker.worker_id, 0) / max(1, len(request.blocks))
            queue = (longest - worker.queued_requests) / (longest - shortest) if longest > shortest else 1.0
            memory = worker.free_blocks / max(1, worker.total_blocks)
            return self._prefix_weight * prefix + QUEUE_WEIGHT * queue + MEMORY_WEIGHT * memory

        return cheapest(workers, lambda worker: -score(worker), numbers)

    choose_decode = choose_prefill
