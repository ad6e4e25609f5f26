"""LMetric: new prefill tokens times batch size.

    score(w) = P(w) * B(w)                                             (tokens x requests; the least wins)
    P(w) = prompt tokens still to compute on w + those of this prompt that w does not hold
    B(w) = requests waiting or running on w + this one

Source: Zhang, Han, Zhang, Wei, Shen, Fang, Yu, Zhou, Chen, "Simple is Better: Multiplication May Be All You Need for
LLM Request Scheduling", OSDI 2026, arXiv:2603.15202. Its point is that there is nothing to set: a weight on either
factor cancels out of the comparison. No setting.

The paper routes to workers that both prefill and decode: `choose_both` is that. The reading for two pools is ours: the
prefill side by the same product with the requests on that side; on the decode side P is the same on every worker (the
prompt comes computed), which leaves B. The detector of hot prefixes that the paper adds for adversarial loads is left
out.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon_simulate.policies.sided import Draws, SidedPolicy, cheapest, requests_on, uncached_tokens
from antiphon_simulate.records import TraceRequest, WorkerState


class LMetricPolicy(SidedPolicy):
    name = "lmetric"

    def choose_prefill(
        self, request: TraceRequest, workers: Sequence[WorkerState], now_ms: float, numbers: Draws
    ) -> WorkerState:
        held = self.cluster.leading_blocks(request)

        def score(worker: WorkerState) -> float:
            new_tokens = uncached_tokens(request, held.get(worker.worker_id, 0), self.cluster.block_tokens)
            return (worker.queued_tokens + new_tokens) * (requests_on(worker) + 1)

        return cheapest(workers, score, numbers)

    def choose_decode(
        self, request: TraceRequest, workers: Sequence[WorkerState], now_ms: float, numbers: Draws
    ) -> WorkerState:
        return cheapest(workers, requests_on, numbers)
