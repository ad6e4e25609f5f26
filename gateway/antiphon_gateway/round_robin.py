"""Routing to compare with: decode workers and prefill workers each in turn, without a look at cache or load.

`--routing round-robin` puts it in the place of `WorkerTable.choose`. It says what the cost-based choice is worth on
one's own traffic, and whether a fault is routing's: all else (the line's order, retries, draining, the answers) stays.

- Nothing is priced, so nothing is held back: a request goes to its worker at once, and waits there.
- Nobody is named to pull a prefix from: what a worker does not hold is computed.

One for each group of workers, so that models that take turns do not share one. Owned by `Placing`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from antiphon_policy.narrowing import FALLBACKS
from antiphon_policy.routing import NoWorker, NoWorkerReason, RouteDecision, RouteReason, RouteRequest, WorkerRole
from antiphon_policy.worker_table import WorkerTable


class RoundRobin:
    """See the module."""

    def __init__(self, table: WorkerTable) -> None:
        self._table = table
        self._turn = 0

    def choose(
        self, request: RouteRequest, leading: Mapping[str, int], tie_break: float, excluded: Collection[str] = ()
    ) -> RouteDecision:
        """As `WorkerTable.choose`, which says what the arguments are. Raises NoWorker."""
        live = [view for view in self._table.views() if not view.draining and view.worker_id not in excluded]
        decoders = sorted(view.worker_id for view in live if view.role is not WorkerRole.PREFILL and view.may_decode)
        if not decoders:
            raise NoWorker(
                NoWorkerReason.NO_DECODE_WORKER,
                f"none of {len(live)} live workers takes an answer: start a worker with role decode or both",
            )
        prefillers = sorted(view.worker_id for view in live if view.role is WorkerRole.PREFILL)
        turn = self._turn
        self._turn += 1
        decode = decoders[turn % len(decoders)]
        first = turn % len(prefillers) if prefillers else 0
        in_turn = prefillers[first:] + prefillers[:first]
        prefill = in_turn[0] if in_turn else None
        usable = max(0, request.prompt_tokens - 1) // max(1, request.block_tokens)
        return RouteDecision(
            decode=decode,
            prefill=prefill,
            prefill_fallbacks=tuple(in_turn[1 : 1 + FALLBACKS]),
            prefix_peers=(),
            predicted_ttft_ms=0.0,
            reason=RouteReason.ROUND_ROBIN,
            prefill_blocks=min(usable, leading.get(prefill or decode, 0)),
            decode_blocks=min(usable, leading.get(decode, 0)),
            usable_blocks=usable,
        )
