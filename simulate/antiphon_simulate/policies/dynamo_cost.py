"""NVIDIA Dynamo's KV router: a weighted sum of prefill and decode work, in blocks.

    cost(w) = weight * max(0, active(w) + prompt - credit * overlap(w)) + decode(w)        (blocks; the least wins)
    active(w)  = prompt tokens still to compute on w / block size
    prompt     = tokens of this prompt / block size
    overlap(w) = leading blocks of it that w holds
    decode(w)  = blocks of the prompts that run on w, those shared counted once, and those that this one adds

Source: Dynamo, "Router Design" and "Disaggregated Serving" of its documentation, and its
`lib/kv-router/src/scheduling/selector`. First `overlap_score_weight` was the weight, and the credit 1; from 1.2 on
there are two settings, `prefill_load_scale` (the weight) and `overlap_score_credit`. Defaults: weight 1, credit 1,
temperature 0 (the least; ties at random).

Two pools: the prefill router tracks no decode blocks, so decode(w) = 0 there; the decode router has credit 0 and no
prefill load, so it is decode(w) alone. Hence with two pools the weight changes nothing unless it is 0 (then the prefill
worker is drawn at random), and the credit is the setting that matters: `DynamoCreditPolicy` sweeps it.

Left out: softmax sampling at a temperature above 0; the queue in the router that holds requests while all workers have
a lot to prefill; the credit's decay (0 by default). Like there, output blocks are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from antiphon_simulate.policies.sided import Draws, SidedPolicy, cheapest
from antiphon_simulate.records import Arrival, ClusterView, Placement, TraceRequest, WorkerState

WEIGHT = 1.0
CREDIT = 1.0


class DynamoCostPolicy(SidedPolicy):
    """Setting: the weight."""

    name = "dynamo_cost"
    default = WEIGHT
    sweep: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)

    def __init__(self, weight: float = WEIGHT, *, credit: float = CREDIT) -> None:
        super().__init__()
        self._weight = weight
        self._credit = credit
        self._running: dict[str, Counter[int]] = {}

    def begin(self, cluster: ClusterView) -> None:
        super().begin(cluster)
        self._running = {worker.worker_id: Counter() for worker in cluster.workers}

    def place(self, arrival: Arrival, now_ms: float) -> Placement:
        placement = super().place(arrival, now_ms)
        self._running[placement.decode].update(arrival.request.blocks)
        return placement

    def ended(self, request: TraceRequest, placement: Placement, now_ms: float) -> None:
        blocks = self._running[placement.decode]
        for block in request.blocks:
            if blocks[block] > 1:
                blocks[block] -= 1
            else:
                del blocks[block]

    def choose_prefill(
        self, request: TraceRequest, workers: Sequence[WorkerState], now_ms: float, numbers: Draws
    ) -> WorkerState:
        costs = self._prefill_costs(request, workers)
        return cheapest(workers, lambda worker: costs[worker.worker_id], numbers)

    def choose_decode(
        self, request: TraceRequest, workers: Sequence[WorkerState], now_ms: float, numbers: Draws
    ) -> WorkerState:
        return cheapest(workers, lambda worker: self._decode_blocks(request, worker), numbers)

    def choose_both(
        self, request: TraceRequest, workers: Sequence[WorkerState], now_ms: float, numbers: Draws
    ) -> WorkerState:
        costs = self._prefill_costs(request, workers)
        return cheapest(workers, lambda worker: costs[worker.worker_id] + self._decode_blocks(request, worker), numbers)

    def _prefill_costs(self, request: TraceRequest, workers: Sequence[WorkerState]) -> dict[str, float]:
        held = self.cluster.leading_blocks(request)
        block_tokens = self.cluster.block_tokens
        return {
            worker.worker_id: self._weight
            * max(
                0.0,
                (worker.queued_tokens + request.prompt_tokens) / block_tokens
                - self._credit * held.get(worker.worker_id, 0),
            )
            for worker in workers
        }

    def _decode_blocks(self, request: TraceRequest, worker: WorkerState) -> int:
        running = self._running[worker.worker_id]
        return len(running) + sum(block not in running for block in request.blocks)


class DynamoCreditPolicy(DynamoCostPolicy):
    """The same at weight 1. Setting: the credit."""

    name = "dynamo_credit"
    default = CREDIT
    sweep = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)

    def __init__(self, credit: float = CREDIT) -> None:
        super().__init__(credit=credit)
