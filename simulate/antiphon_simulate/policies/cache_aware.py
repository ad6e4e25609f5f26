"""SGLang's and smg's cache_aware: stick to who had the prefix while loads are about even, else the shortest queue.

    load(w)    = requests on w
    imbalanced = max load - min load > balance_abs_threshold  and  max load > balance_rel_threshold * min load
    imbalanced:                                  the worker of least load
    else, matched / prompt > cache_threshold:    the worker that the longest matching prefix was sent to last
    else:                                        the worker of least load

"Matched" is what the router's own tree says (`prefix_tree`): it is built from what was routed, not from events.

Source: `sgl-model-gateway/src/policies/cache_aware.rs` and `tree.rs` of SGLang; "Cache-Aware Routing" of smg's
documentation. Defaults are those of their command lines: cache_threshold 0.3, balance_abs_threshold 64,
balance_rel_threshold 1.5, at most 2^26 characters of tree for each worker, shrunk every 120 s. Settings swept: here
`cache_threshold` over the values that its documentation names; `CacheAwareBalancePolicy` sweeps balance_abs_threshold,
which at 64 never acts on a cluster that keeps its promises.

Two pools: this on the prefill side and power of two choices on the decode side, as in their examples of
`--prefill-policy cache_aware --decode-policy power_of_two`. Unlike there: matching is by blocks and tokens, not by
characters (four characters a token, for the bound); of equal loads one is drawn where they take the first of the list.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon_simulate.policies.power_of_two import less_loaded_of_two
from antiphon_simulate.policies.prefix_tree import PrefixTree
from antiphon_simulate.policies.sided import Draws, SidedPolicy, cheapest, requests_on
from antiphon_simulate.records import TraceRequest, WorkerState

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5

TREE_TOKENS = (1 << 26) // 4
"""Of each worker, after shrinking."""

SHRINK_EVERY_MS = 120_000.0


class CacheAwarePolicy(SidedPolicy):
    """Setting: cache_threshold."""

    name = "cache_aware"
    default = CACHE_THRESHOLD
    sweep: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5, 0.8)

    def __init__(
        self,
        cache_threshold: float = CACHE_THRESHOLD,
        *,
        balance_abs_threshold: float = BALANCE_ABS_THRESHOLD,
        tree_tokens: int = TREE_TOKENS,
    ) -> None:
        super().__init__()
        self._cache_threshold = cache_threshold
        self._balance_abs_threshold = balance_abs_threshold
        self._tree_tokens = tree_tokens
        self._shrunk_ms = 0.0
        self.tree = PrefixTree()

    def choose_prefill(
        self, request: TraceRequest, workers: Sequence[WorkerState], now_ms: float, numbers: Draws
    ) -> WorkerState:
        if now_ms - self._shrunk_ms >= SHRINK_EVERY_MS:
            self._shrunk_ms = now_ms
            self.tree.shrink(self._tree_tokens // self.cluster.block_tokens)
        chosen = self._choose(request, workers, numbers)
        self.tree.insert(request.blocks, chosen.worker_id)
        return chosen

    def choose_decode(
        self, request: TraceRequest, workers: Sequence[WorkerState], now_ms: float, numbers: Draws
    ) -> WorkerState:
        return less_loaded_of_two(workers, numbers)

    def _choose(self, request: TraceRequest, workers: Sequence[WorkerState], numbers: Draws) -> WorkerState:
        if not self._imbalanced(workers):
            matched, worker_id = self.tree.match(request.blocks)
            tokens = min(matched * self.cluster.block_tokens, request.prompt_tokens)
            if tokens > self._cache_threshold * request.prompt_tokens:
                return next(worker for worker in workers if worker.worker_id == worker_id)
        return cheapest(workers, requests_on, numbers)

    def _imbalanced(self, workers: Sequence[WorkerState]) -> bool:
        loads = [requests_on(worker) for worker in workers]
        most, least = max(loads), min(loads)
        return most - least > self._balance_abs_threshold and most > BALANCE_REL_THRESHOLD * least


class CacheAwareBalancePolicy(CacheAwarePolicy):
    """The same at cache_threshold 0.3. Setting: balance_abs_threshold."""

    name = "cache_aware_balance"
    default = float(BALANCE_ABS_THRESHOLD)
    sweep = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)

    def __init__(self, balance_abs_threshold: float = BALANCE_ABS_THRESHOLD) -> None:
        super().__init__(balance_abs_threshold=balance_abs_threshold)
