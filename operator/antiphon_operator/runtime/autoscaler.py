"""The autoscaler: asks the law every two seconds about each Model in the modes Advise and Enforce. Of the others it
measures how their promise is kept.

    the planner ──ScaledModel──▶ Autoscaler ──▶ decide ──AutoscalerView──▶ the planner ──▶ Pool.spec.replicas
    gateways ──news in Redis──▶      │
                                     └──▶ memory and decisions in Redis

It decides and changes nothing: the planner is shown what was decided, and applies it to the Pools as it applies all
else. A decision is a size and not a step, so it may be made twice, forgotten, or applied late: an operator that was
killed anywhere between is followed by one that comes to the same size. What the law remembers stands in Redis, so the
next operator is as patient as this one was.

Without Redis there are no news, and the law keeps all as it is; before the memory was read once, nothing is decided at
all. The law runs on a thread of its own, and for no more than half of the time: with hundreds of busy Models each is
asked about less often.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from antiphon_policy.scaling import (
    GatewayNews,
    ModelSetup,
    PoolSetup,
    ScalingAction,
    ScalingDecision,
    ScalingInputs,
    decide,
    merged,
)
from antiphon_policy.scaling.assembly import WorkerFigures, figures_of, is_fresh, workers_of
from antiphon_policy.scaling.remembered import Remembered, told_after
from antiphon_policy.scaling.victims import losses

from antiphon_operator.plan.advice import LimitSeen, limit_of, measured_of, said_lately, view_of
from antiphon_operator.plan.observed import AutoscalerView
from antiphon_operator.plan.scaled_records import ScaledModel, ScaledPool, ScalingPart
from antiphon_operator.runtime.metrics import ScalingMetrics
from antiphon_operator.runtime.scaling_store import Shelf, StoreError
from antiphon_operator.runtime.start_times import StartTimes, starting_ms

log = logging.getLogger("antiphon.operator.autoscaler")

EVERY_S = 2.0
_KEPT_EVERY_MS = 10_000.0
_RECORDED_EVERY_MS = 60_000.0
_MEASURED_EVERY_MS = 10_000.0
_NUMBERS_EVERY_MS = 30_000.0
"""So often the planner is shown figures that changed while nothing was decided."""
_APPLIED_WITHIN_MS = 10_000.0
"""A decision is taken to be in the Pools when the planner has looked since, or after this time."""


class Store(Protocol):
    """The part of `ScalingStore` that is used here. All raise StoreError."""

    async def read(self, model_key: str, *, with_memory: bool) -> Shelf: ...

    async def keep(self, model_key: str, remembered: Remembered, decision: ScalingDecision | None) -> None: ...


@dataclass(slots=True)
class _Case:
    """One Model."""

    model: ScaledModel
    times: StartTimes = field(default_factory=StartTimes)
    remembered: Remembered | None = None
    """None: not read yet."""
    news: tuple[GatewayNews, ...] = ()
    view: AutoscalerView | None = None
    limit: LimitSeen | None = None
    applied_by_ms: float = 0.0
    """Until then a decision may not be in the Pools yet; 0: it is."""
    measured_ms: float = 0.0
    kept_ms: float = 0.0
    recorded_ms: float = 0.0
    shown_ms: float = 0.0


class Autoscaler:
    """See the module's docstring. `wake`: the planner is to look at the Model."""

    def __init__(
        self,
        store: Store,
        wake: Callable[[str], None],
        metrics: ScalingMetrics,
        *,
        every_s: float = EVERY_S,
        now_ms: Callable[[], float] = lambda: time.time() * 1000.0,
    ) -> None:
        self._store = store
        self._wake = wake
        self._metrics = metrics
        self._every_s = every_s
        self._now_ms = now_ms
        self._cases: dict[str, _Case] = {}
        self._trouble = ""
        self._broken: set[str] = set()

    # -- what the planner tells and asks

    def tell(self, model_key: str, model: ScaledModel | None) -> None:
        """What the planner has found in this look. None: the Model is not for the autoscaler."""
        if model is None:
            self._cases.pop(model_key, None)
            self._broken.discard(model_key)
            return
        case = self._cases.get(model_key)
        if case is None or case.model.uid != model.uid or case.model.part is not model.part:
            case = self._cases[model_key] = _Case(model)
        case.model = model
        case.applied_by_ms = 0.0
        case.times.looked(model, self._now_ms())

    def view(self, model_key: str) -> AutoscalerView | None:
        case = self._cases.get(model_key)
        return None if case is None else case.view

    # -- deciding

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began = time.monotonic()
            worked_s = 0.0
            for key in tuple(self._cases):
                worked_s += await self._looked(key)
            self._metrics.told([case.view for case in self._cases.values() if case.view is not None])
            await asyncio.sleep(max(self._every_s - (time.monotonic() - began), worked_s))

    async def _looked(self, model_key: str) -> float:
        """A fault with one Model leaves its sizes as they are, and the others go on."""
        try:
            return await self.look(model_key)
        except Exception:
            if model_key not in self._broken:
                self._broken.add(model_key)
                log.exception("%s: the autoscaler failed on it: its sizes stay as they are", model_key)
            return 0.0

    async def look(self, model_key: str) -> float:
        """One look at one Model. Answers for how many seconds the law ran."""
        case = self._cases.get(model_key)
        if case is None:
            return 0.0
        if case.model.part is ScalingPart.MEASURE:
            await self._measure(model_key, case)
            return 0.0
        if not await self._heard(model_key, case):
            return 0.0
        assert case.remembered is not None
        now_ms = self._now_ms()
        fresh = [one for one in case.news if is_fresh(one, now_ms)]
        case.remembered = _noted(case, fresh)
        if now_ms < case.applied_by_ms:
            return 0.0
        model, inputs = case.model, _inputs(case, now_ms)
        began = time.monotonic()
        decision, switched = await asyncio.to_thread(_decided, inputs)
        took_s = time.monotonic() - began
        self._metrics.decided(decision, took_s)
        stands = self._cases.get(model_key) is case and case.model.promise == model.promise
        if stands and case.model.part is model.part:
            await self._settled(model_key, case, model, decision, switched, fresh)
        return took_s

    async def _measure(self, model_key: str, case: _Case) -> None:
        """How the promise is kept, and what workers are worth, where the sizes are others' concern."""
        now_ms = self._now_ms()
        if now_ms - case.measured_ms < _MEASURED_EVERY_MS:
            return
        case.measured_ms = now_ms
        try:
            case.news = (await self._store.read(model_key, with_memory=False)).news
        except StoreError as error:
            self._in_trouble(str(error))
            return
        self._in_order()
        model = case.model
        workers = workers_of(one for one in case.news if is_fresh(one, now_ms))
        figures = [figures_of(workers.values(), pool.does, pool.revision) for pool in model.pools]
        lost_ms = losses(workers.values(), figures[0] or WorkerFigures())
        case.view = measured_of(case.news, model, figures, now_ms, lost_ms)
        if case.news and now_ms - case.shown_ms >= _NUMBERS_EVERY_MS:
            self._show(model_key, case, now_ms)

    async def _heard(self, model_key: str, case: _Case) -> bool:
        """Whether there is anything to decide from."""
        try:
            shelf = await self._store.read(model_key, with_memory=case.remembered is None)
        except StoreError as error:
            self._in_trouble(str(error))
            return case.remembered is not None
        self._in_order()
        # A server that came back empty has no news either: those that there were grow old.
        case.news = shelf.news or case.news
        if case.remembered is None:
            found, owner = shelf.remembered, case.model.uid
            case.remembered = found if found is not None and found.owner == owner else Remembered(owner=owner)
        return True

    async def _settled(
        self,
        model_key: str,
        case: _Case,
        model: ScaledModel,
        decision: ScalingDecision,
        switched: ScalingDecision | None,
        fresh: list[GatewayNews],
    ) -> None:
        """The decision is remembered, shown and written down."""
        assert case.remembered is not None
        now_ms, before = decision.at_ms, case.remembered.told
        told = told_after(before, decision)
        if before is not None and model.part is ScalingPart.ADVISE and said_lately(before, decision):
            told = before
        case.remembered = msgspec.structs.replace(case.remembered, memory=decision.memory, told=told)
        limit = limit_of(decision, model)
        if limit is not None:
            case.limit = LimitSeen(limit, now_ms)
        view = view_of(decision, model, told, case.limit, switched, _lost_ms(case, fresh))
        is_new = told != before
        if is_new and told.action is not ScalingAction.NONE:
            log.info("%s: %s%s", model_key, "" if model.part is ScalingPart.ENFORCE else "(advice) ", told.sentence)
        shown = _shown(case.view)
        case.view = view
        if _shown(view) != shown:
            if model.part is ScalingPart.ENFORCE and any(view.sizes[pool.role] != pool.size for pool in model.pools):
                case.applied_by_ms = now_ms + _APPLIED_WITHIN_MS
            self._show(model_key, case, now_ms)
        elif now_ms - case.shown_ms >= _NUMBERS_EVERY_MS:
            self._show(model_key, case, now_ms)
        recorded = is_new or now_ms - case.recorded_ms >= _RECORDED_EVERY_MS
        if not recorded and now_ms - case.kept_ms < _KEPT_EVERY_MS:
            return
        try:
            await self._store.keep(model_key, case.remembered, decision if recorded else None)
        except StoreError as error:
            self._in_trouble(str(error))
            return
        case.kept_ms = now_ms
        if recorded:
            case.recorded_ms = now_ms

    def _show(self, model_key: str, case: _Case, now_ms: float) -> None:
        case.shown_ms = now_ms
        self._wake(model_key)

    def _in_order(self) -> None:
        if self._trouble:
            log.info("redis answers again")
            self._trouble = ""
            # It may have come back empty.
            for case in self._cases.values():
                case.kept_ms = 0.0

    def _in_trouble(self, what: str) -> None:
        """Said once per outage."""
        if not self._trouble:
            log.warning("the autoscaler keeps sizes as they are: %s", what)
        self._trouble = what


def _decided(inputs: ScalingInputs) -> tuple[ScalingDecision, ScalingDecision | None]:
    """On the thread. Pools of a cluster cannot change roles; whether it would help is worth a word."""
    decision = decide(inputs)
    if decision.action is not ScalingAction.ADD or len({pool.shape for pool in inputs.pools}) != 1:
        return decision, None
    return decision, decide(msgspec.structs.replace(inputs, may_switch=True))


def _noted(case: _Case, fresh: list[GatewayNews]) -> Remembered:
    """With what the pools and the gateways show now."""
    assert case.remembered is not None
    remembered = case.times.added_to(case.remembered)
    workers = workers_of(fresh).values()
    for pool in case.model.pools:
        figures = figures_of(workers, pool.does, pool.revision)
        past = remembered.of(pool.does)
        if figures is not None and figures != past.figures:
            remembered = remembered.with_pool(msgspec.structs.replace(past, figures=figures))
    return msgspec.structs.replace(remembered, history=remembered.history.heard(fresh))


def _inputs(case: _Case, now_ms: float) -> ScalingInputs:
    assert case.remembered is not None
    model = case.model
    setup = ModelSetup(
        promise=model.promise,
        pools=tuple(_pool(pool, case, now_ms) for pool in model.pools),
        budget_devices=model.budget_devices,
    )
    return merged(case.news, setup, case.remembered.history, case.remembered.memory, now_ms)


def _pool(pool: ScaledPool, case: _Case, now_ms: float) -> PoolSetup:
    assert case.remembered is not None
    past = case.remembered.of(pool.does)
    own = {replica.name: replica for replica in case.model.replicas if replica.role == pool.role}
    living = [replica for replica in own.values() if replica.draining_since_ms is None]
    ready = min(pool.size, sum(replica.ready for replica in living))
    return PoolSetup(
        role=pool.does,
        size=pool.size,
        ready=ready,
        starting_ms=tuple(starting_ms(pool, own, past, now_ms)[: pool.size - ready]),
        draining=len(own) - len(living),
        floor=pool.floor,
        ceiling=pool.ceiling,
        devices=pool.devices,
        start_ms=past.start_ms,
        drain_ms=past.drain_ms,
        shape=pool.shape,
        edits=pool.edits,
        revision=pool.revision,
        figures=past.figures,
    )


def _lost_ms(case: _Case, fresh: list[GatewayNews]) -> dict[str, float]:
    assert case.remembered is not None
    prompts = case.model.pools[0].does
    figures: WorkerFigures = case.remembered.of(prompts).figures
    return losses(workers_of(fresh).values(), figures)


def _shown(view: AutoscalerView | None) -> object:
    """What the planner is to hear of at once."""
    if view is None:
        return None
    limit = view.limit.reason if view.limit is not None else None
    return view.sizes, view.edits, view.told, limit, view.silent, view.advice
