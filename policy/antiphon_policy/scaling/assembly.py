"""From what gateways tell and what is known of the pools to what the law is asked with. Pure.

    news of gateways ┐
    pools, promise   ├──▶ merged ──▶ ScalingInputs ──▶ decide
    history, memory  ┘

Requests and lines of gateways are added up. What workers said of themselves is the same from whichever gateway heard it
last, so of each worker the newest word counts. A gateway that is silent is left out of what is so *now*; the requests
that it told of stay, as they were served; the others go on. One worker of the pool speaks for all: the one in the
middle by the time that it takes for a typical step, so that a stalled one sizes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from antiphon_policy.latency import CHUNK_TOKENS, StepModel
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling.history import History
from antiphon_policy.scaling.news import GatewayNews, WorkerNews
from antiphon_policy.scaling.records import (
    MOST_SAMPLES,
    PoolView,
    Promise,
    RequestSample,
    ScalingInputs,
    ScalingMemory,
)

SILENT_MS = 10_000.0
"""News that are older say nothing of now: gateways write theirs every second or two."""


class WorkerFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one worker of a pool can do. The defaults are those of a worker that nobody knows anything of."""

    step: StepModel = StepModel()
    chunk_tokens: int = CHUNK_TOKENS
    max_sequences: int = 256
    kv_capacity_tokens: int = 1_000_000


class PoolSetup(msgspec.Struct, frozen=True, omit_defaults=True):
    """One pool, as whoever runs it knows it. See `PoolView` for what the fields mean."""

    role: WorkerRole
    size: int
    ready: int
    starting_ms: tuple[float, ...] = ()
    draining: int = 0
    floor: int = 1
    ceiling: int = 8
    devices: int = 1
    start_ms: float = 60_000.0
    drain_ms: float = 30_000.0
    shape: str = ""
    edits: int = 0
    revision: str = ""
    """Of its workers those of this revision say how fast a worker is; empty: any."""
    figures: WorkerFigures = WorkerFigures()
    """Where no worker has said anything: what was last known of one, or guessed."""


class ModelSetup(msgspec.Struct, frozen=True, omit_defaults=True):
    """One Model, as whoever runs its pools knows it."""

    promise: Promise
    pools: tuple[PoolSetup, ...]
    """A prefill and a decode pool, or one of both."""
    budget_devices: int | None = None
    may_switch: bool = False


def is_fresh(news: GatewayNews, now_ms: float) -> bool:
    """A clock that is as far ahead is as wrong."""
    return abs(now_ms - news.at_ms) <= SILENT_MS


def merged(
    news: Sequence[GatewayNews], setup: ModelSetup, history: History, memory: ScalingMemory, now_ms: float
) -> ScalingInputs:
    """What the law is to be asked with. `history`: with these news (`History.heard`)."""
    fresh = [one for one in news if is_fresh(one, now_ms)]
    workers = workers_of(fresh)
    held = sum(one.held_requests for one in fresh)
    held_tokens = sum(one.held_tokens for one in fresh)
    views = [_view(pool, fresh, workers) for pool in setup.pools]
    if held and any(pool.ready == 0 for pool in setup.pools):
        views = [_with_held(view, held, held_tokens) for view in views]
    return ScalingInputs(
        now_ms=now_ms,
        promise=setup.promise,
        pools=tuple(views),
        samples=thinned(sample for one in news for sample in one.samples),
        news_age_ms=max(0.0, now_ms - max(one.at_ms for one in news)) if news else None,
        arrivals=history.arrivals(),
        budget_devices=setup.budget_devices,
        may_switch=setup.may_switch,
        memory=memory,
    )


def workers_of(news: Iterable[GatewayNews]) -> dict[str, WorkerNews]:
    """By worker id, the newest word of each. What it saved is counted by each gateway for its own requests, so that is
    added up."""
    found: dict[str, WorkerNews] = {}
    for one in news:
        for worker in one.workers:
            before = found.get(worker.worker_id)
            if before is None:
                found[worker.worker_id] = worker
                continue
            newer = worker if worker.said_ms > before.said_ms else before
            hits = before.hit_tokens + worker.hit_tokens
            found[worker.worker_id] = msgspec.structs.replace(newer, hit_tokens=hits)
    return found


def figures_of(workers: Iterable[WorkerNews], role: WorkerRole, revision: str = "") -> WorkerFigures | None:
    """What a worker of the pool can do, by what they said; None: none of them said anything. Workers that drain tell
    it as well as others."""
    known = [(worker.step, worker) for worker in workers if worker.step is not None and worker.role is role]
    own = [found for found in known if revision in ("", found[1].revision)]
    if not own:
        return None
    ranked = sorted(own, key=lambda found: (_typical_ms(found[0]), found[1].worker_id))
    step, worker = ranked[len(ranked) // 2]
    default = WorkerFigures()
    return WorkerFigures(
        step=step,
        chunk_tokens=worker.chunk_tokens if worker.chunk_tokens > 0 else default.chunk_tokens,
        max_sequences=worker.max_sequences if worker.max_sequences > 0 else default.max_sequences,
        kv_capacity_tokens=worker.block_tokens * worker.total_blocks or default.kv_capacity_tokens,
    )


def thinned(samples: Iterable[RequestSample], most: int = MOST_SAMPLES) -> tuple[RequestSample, ...]:
    """Oldest first, at most so many, of the same weight together. Of neighbours in time the one in the middle of their
    weight stands for all."""
    ordered = sorted(samples, key=lambda sample: sample.at_ms)
    if len(ordered) <= most:
        return tuple(ordered)
    kept = []
    for number in range(most):
        group = ordered[number * len(ordered) // most : (number + 1) * len(ordered) // most]
        whole = sum(sample.weight for sample in group)
        kept.append(msgspec.structs.replace(_middle(group, whole), weight=whole))
    return tuple(kept)


def _middle(group: Sequence[RequestSample], whole: float) -> RequestSample:
    passed = 0.0
    for sample in group:
        passed += sample.weight
        if passed >= whole / 2.0:
            return sample
    return group[-1]


def _view(pool: PoolSetup, news: Sequence[GatewayNews], workers: dict[str, WorkerNews]) -> PoolView:
    lines = [line for one in news for line in one.pools if line.role is pool.role]
    own = [worker for worker in workers.values() if worker.role is pool.role]
    figures = figures_of(own, pool.role, pool.revision) or pool.figures
    return PoolView(
        role=pool.role,
        size=pool.size,
        ready=pool.ready,
        starting_ms=pool.starting_ms,
        draining=pool.draining,
        floor=pool.floor,
        ceiling=pool.ceiling,
        step=figures.step,
        chunk_tokens=figures.chunk_tokens,
        max_sequences=figures.max_sequences,
        kv_capacity_tokens=figures.kv_capacity_tokens,
        start_ms=pool.start_ms,
        drain_ms=pool.drain_ms,
        queued_tokens=sum(line.queued_tokens for line in lines) + sum(worker.waiting_tokens for worker in own),
        queued_requests=sum(line.queued_requests for line in lines),
        running=sum(worker.running for worker in own),
        kv_tokens=sum(worker.kv_tokens for worker in own),
        devices=pool.devices,
        shape=pool.shape,
        edits=pool.edits,
    )


def _with_held(view: PoolView, requests: int, tokens: int) -> PoolView:
    """Requests that wait for a Model's first workers want all its pools: prompts are computed in one, and answers
    decoded in the other."""
    prompts = view.role is not WorkerRole.DECODE
    return msgspec.structs.replace(
        view,
        queued_requests=view.queued_requests + requests,
        queued_tokens=view.queued_tokens + (tokens if prompts else 0),
    )


def _typical_ms(step: StepModel) -> float:
    """Of a step with a short piece of a prompt and some answers."""
    return step.step_ms(new_tokens=128, token_context=128 * 512, sequences=8, kv_tokens=8 * 512)
