"""A decision made again from its inputs: routing is a pure function, so the same must come out.

Where there were more workers than a record keeps, the replay is over the kept ones. Those that the decision names are
among them, and no other one was better, but it is not quite the same choice: near ties are drawn among other pairs, and
how much waits at the least loaded worker may differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon_policy.routing import NoWorker, RouteDecision
from antiphon_policy.worker_table import WorkerTable

from antiphon_gateway.explain_document import Attempt

_SAME_MS = 1e-6
"""Sums of the same terms; another machine may round them otherwise."""


@dataclass(frozen=True, slots=True)
class Replay:
    decision: RouteDecision | None
    """None: nobody can take it."""
    same: bool
    differences: tuple[str, ...]
    """What was recorded, and what comes out."""
    whole: bool
    """All workers of then took part."""


def replay(attempt: Attempt) -> Replay:
    """Decide again."""
    inputs = attempt.inputs
    whole = len(inputs.workers) == inputs.workers_in_all
    table = WorkerTable({(link.reader, link.holder): link.gigabytes_per_s for link in inputs.links}, inputs.workload)
    for view in inputs.workers:
        table.put(view)
    try:
        made = table.choose(inputs.request, inputs.leading, inputs.tie_break, inputs.excluded)
    except NoWorker as error:
        return Replay(None, False, (f"recorded decode={attempt.decision.decode}, replayed: {error}",), whole)
    differences = tuple(_differences(attempt, made))
    return Replay(made, not differences, differences, whole)


def _differences(attempt: Attempt, made: RouteDecision) -> list[str]:
    then = attempt.decision
    compared = (
        ("decode", then.decode, made.decode),
        ("prefill", then.prefill, made.prefill),
        ("reason", then.reason, made.reason.value),
        ("fallbacks", then.fallbacks, list(made.prefill_fallbacks)),
        ("peers", [(peer.worker, peer.blocks) for peer in then.peers], list(made.prefix_peers)),
        (
            "alternatives",
            [(option.decode, option.prefill) for option in then.alternatives],
            [(option.decode, option.prefill) for option in made.alternatives],
        ),
    )
    found = [f"{name}: recorded {old}, replayed {new}" for name, old, new in compared if old != new]
    old_ms = then.chosen.cost_ms if then.chosen is not None else 0.0
    new_ms = made.cost.total_ms if made.cost is not None else 0.0
    if abs(old_ms - new_ms) > _SAME_MS * max(1.0, abs(old_ms)):
        found.append(f"cost: recorded {old_ms:.3f} ms, replayed {new_ms:.3f} ms")
    return found
