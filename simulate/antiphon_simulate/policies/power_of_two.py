"""Power of two choices: two different workers at random, and of them the one with less load.

    load(w) = prompt tokens still to compute on w + tokens of the contexts that decode on w      (tokens)

Source: Mitzenmacher, "The power of two choices in randomized load balancing" (IEEE TPDS 2001); as the `power_of_two`
policy of SGLang's router and of smg, which compares tokens where both workers report them, else requests. No setting.
Unlike there, the load is not polled once in some seconds but is what this gateway knows now, with its own dispatches:
a polled one sends all requests between two polls to the same worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon_simulate.policies.sided import Draws, SidedPolicy
from antiphon_simulate.records import TraceRequest, WorkerState


class PowerOfTwoPolicy(SidedPolicy):
    name = "power_of_two"

    def choose_prefill(
        self, request: TraceRequest, workers: Sequence[WorkerState], now_ms: float, numbers: Draws
    ) -> WorkerState:
        return less_loaded_of_two(workers, numbers)

    def choose_decode(
        self, request: TraceRequest, workers: Sequence[WorkerState], now_ms: float, numbers: Draws
    ) -> WorkerState:
        return less_loaded_of_two(workers, numbers)


def tokens_on(worker: WorkerState) -> int:
    return worker.queued_tokens + worker.kv_tokens


def less_loaded_of_two(workers: Sequence[WorkerState], numbers: Draws) -> WorkerState:
    """Of two different ones (where there are two) the less loaded; the first drawn if they are equal."""
    first = int(next(numbers) * len(workers))
    if len(workers) == 1:
        return workers[first]
    # One of the others, each as likely as the next.
    second = (first + 1 + int(next(numbers) * (len(workers) - 1))) % len(workers)
    return min(workers[first], workers[second], key=tokens_on)
