"""Which worker goes when a pool has too many: the one whose loss costs least, in milliseconds of computing. Pure.

    loss = what its answers' contexts would take to compute elsewhere, if they have to move
         + what the prompts that it accepted and has not computed would take
         + what its cache saved in the last window, and would have to be computed in the next

All are priced by one step model, that of where prompts are computed: a worker is worth no more for being slow. Workers
that are not ready serve nobody and go before all others; of equals the newest goes, whose cache had the least time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from antiphon_policy.scaling.assembly import WorkerFigures
from antiphon_policy.scaling.news import WorkerNews


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may go. `born`: a later one has a larger number."""

    worker_id: str
    ready: bool
    born: int


def loss_ms(worker: WorkerNews, figures: WorkerFigures) -> float:
    """With 4 answers of 1,000 tokens each, 500 tokens that wait and 10,000 tokens saved, at 0.5 ms a token and nothing
    else: 2,000 + 250 + 5,000 ms."""
    step, chunk = figures.step, max(1, figures.chunk_tokens)
    moved_ms = 0.0
    if worker.running > 0:
        context = max(0, worker.kv_tokens) // worker.running
        moved_ms = worker.running * step.prefill_ms(new_tokens=context, chunk_tokens=chunk)
    per_token_ms = step.prefill_ms(new_tokens=chunk, chunk_tokens=chunk) / chunk
    return moved_ms + (max(0, worker.waiting_tokens) + max(0, worker.hit_tokens)) * per_token_ms


def losses(workers: Iterable[WorkerNews], figures: WorkerFigures) -> dict[str, float]:
    """By worker id. `figures`: of the pool that computes prompts."""
    return {worker.worker_id: loss_ms(worker, figures) for worker in workers}


def first_to_go(candidates: Iterable[Candidate], lost_ms: Mapping[str, float]) -> list[Candidate]:
    """All of them, those to go first at the front. One of which nobody told anything has nothing to lose."""
    return sorted(
        candidates,
        key=lambda one: (one.ready, lost_ms.get(one.worker_id, 0.0) if one.ready else 0.0, -one.born, one.worker_id),
    )
