"""One look at one Model: assemble what is observed, plan, carry the plan out.

    caches + wants ──▶ Observed ──▶ plan ──▶ record ▸ access ▸ applies ▸ deletes ▸ statuses ▸ events ──▶ wants

The work of the queue, so never twice at the same time for one Model. It decides nothing itself: whatever it does not
get done, the next look does. A plan that raises touches nothing of that Model and says so in its status; the others
go on. A look that wrote something is followed by another, until one has nothing left to write.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol

from antiphon_kvtransfer.model_record import ModelRecord

from antiphon_operator.kube.errors import KubeError, NotFound
from antiphon_operator.options import OperatorContext
from antiphon_operator.plan.observed import Object, Observed
from antiphon_operator.plan.planned import Plan
from antiphon_operator.runtime.access import Access
from antiphon_operator.runtime.announcer import Announcer
from antiphon_operator.runtime.applier import Applier, Failure, Outcome
from antiphon_operator.runtime.autoscaler import Autoscaler
from antiphon_operator.runtime.caches import Caches
from antiphon_operator.runtime.gang_tokens import GangTokens
from antiphon_operator.runtime.metrics import OperatorMetrics
from antiphon_operator.runtime.objects import namespace_of, uid_of
from antiphon_operator.runtime.queue import WorkFailedError
from antiphon_operator.runtime.status_writer import StatusWriter
from antiphon_operator.runtime.trouble import BROKEN, backoff_for, refused, with_internal_error, with_refusal
from antiphon_operator.runtime.wants import Looks

log = logging.getLogger("antiphon.operator.reconcile")

Planner = Callable[[Observed, OperatorContext, datetime], Plan]

_FIRST_LOOK_AGAIN_S = 0.02
_LONGEST_LOOK_AGAIN_S = 30.0


class Records(Protocol):
    """The part of `RecordWriter` that keeps model records."""

    def put(self, record: ModelRecord) -> None: ...

    def remove(self, model_key: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What a reconciler works with. `records`, `access` and `autoscaler` are None where no Redis is configured."""

    caches: Caches
    applier: Applier
    status: StatusWriter
    looks: Looks
    announcer: Announcer
    metrics: OperatorMetrics
    gang_tokens: GangTokens
    records: Records | None = None
    autoscaler: Autoscaler | None = None
    access: Access | None = None


class Reconciler:
    """See the module's docstring. `look` is the queue's work."""

    def __init__(self, plan: Planner, context: OperatorContext, parts: Parts, now: Callable[[], datetime]) -> None:
        self._plan = plan
        self._context = context
        self._parts = parts
        self._now = now
        self._uids: dict[str, str] = {}
        self._writing_looks: dict[str, int] = {}

    async def look(self, key: str) -> float | None:
        """Raises WorkFailedError. See `queue.Work`."""
        began = time.monotonic()
        metrics = self._parts.metrics
        model = self._parts.caches.model(key)
        if model is None:
            self._gone(key)
            metrics.reconciles.labels("gone").inc()
            return None
        if self._uids.setdefault(key, uid_of(model)) != uid_of(model):
            self._gone(key)
            self._uids[key] = uid_of(model)
        try:
            after_s, changed = await self._reconcile(key, model)
        except BaseException:
            metrics.reconciles.labels("failed").inc()
            raise
        finally:
            metrics.reconcile_milliseconds.observe((time.monotonic() - began) * 1e3)
        metrics.reconciles.labels("changed" if changed else "settled").inc()
        return after_s

    async def _reconcile(self, key: str, model: Object) -> tuple[float | None, bool]:
        plan = await self._planned(key, model)
        self._record(key, plan)
        failures: list[Failure] = []
        waits: list[float | None] = [plan.check_after_s]
        waits.append(await self._grant(model, plan, failures))
        waits.append(await self._grant_token(key, model, plan, failures))
        outcome = await self._parts.applier.carry_out(model, plan)
        failures += outcome.failures
        if self._parts.autoscaler is not None and not any(failure.kind == "Pool" for failure in outcome.failures):
            # A Pool that could not be applied has another size than the plan says.
            self._parts.autoscaler.tell(key, plan.scaled)
        waits.append(await self._write_statuses(model, plan, failures))
        await self._announce(model, plan, outcome)
        self._parts.looks.want(key, plan.wants)
        if failures:
            told = "; ".join(f"{failure.what}: {failure.error}" for failure in failures[:3])
            raise WorkFailedError(told, backoff_for([failure.error for failure in failures]))
        waits.append(self._look_again_s(key, outcome.writes))
        return min((wait for wait in waits if wait is not None), default=None), bool(outcome.writes)

    async def _planned(self, key: str, model: Object) -> Plan:
        began = time.monotonic()
        try:
            return self._plan(self._observed(key, model), self._context, self._now())
        except Exception as error:
            log.exception("%s: planning failed", key)
            try:
                await self._parts.status.write("Model", model, with_internal_error(model, error, self._now()))
            except KubeError as unwritten:
                log.warning("%s: the status could not be written: %s", key, unwritten)
            raise WorkFailedError(f"planning failed: {type(error).__name__}", BROKEN) from error
        finally:
            self._parts.metrics.plan_milliseconds.observe((time.monotonic() - began) * 1e3)

    def _observed(self, key: str, model: Object) -> Observed:
        caches, shown = self._parts.caches, self._parts.looks.shown(key)
        pods = caches.pods(model)
        return Observed(
            model=model,
            children=caches.children(model),
            pods=pods,
            name_owners=caches.name_owners(model),
            lost_nodes=caches.lost_nodes(pods),
            claims=caches.claims(model),
            events=shown.events,
            log_lines=shown.log_lines,
            workers=shown.workers,
            gateways=shown.gateways,
            namespace_labels=caches.namespace_labels(namespace_of(model)),
            autoscaler=None if self._parts.autoscaler is None else self._parts.autoscaler.view(key),
        )

    async def _grant(self, model: Object, plan: Plan, failures: list[Failure]) -> float | None:
        if self._parts.access is None or plan.redis is None:
            return None
        try:
            return await self._parts.access.grant(model, plan.redis, self._parts.caches.pods(model))
        except KubeError as error:
            failures.append(Failure(f"Secret {plan.redis.secret_name}", error))
            return None

    async def _grant_token(self, key: str, model: Object, plan: Plan, failures: list[Failure]) -> float | None:
        if plan.gang_secret is None:
            self._parts.gang_tokens.forget(key)
            return None
        try:
            return await self._parts.gang_tokens.grant(model, plan.gang_secret, self._parts.caches.pods(model))
        except KubeError as error:
            failures.append(Failure(f"Secret {plan.gang_secret}", error))
            return None

    async def _write_statuses(self, model: Object, plan: Plan, failures: list[Failure]) -> float | None:
        """The Model's and its Pools'. What fails is added to `failures`."""
        told = refused(failures)
        status = with_refusal(plan.status, model, told, self._now()) if told else plan.status
        wanted: list[tuple[Literal["Model", "Pool"], Object, Mapping[str, Any]]] = [("Model", model, status)]
        for name, pool_status in plan.pool_status.items():
            pool = self._parts.caches.child(model, "Pool", name)
            if pool is not None:
                wanted.append(("Pool", pool, pool_status))
        waits: list[float] = []
        for kind, live, said in wanted:
            try:
                wait = await self._parts.status.write(kind, live, said)
            except NotFound:
                log.debug("%s is gone: its status is not written", kind)
            except KubeError as error:
                failures.append(Failure(f"status of {kind}", error))
            else:
                if wait is not None:
                    waits.append(wait)
        return min(waits, default=None)

    def _record(self, key: str, plan: Plan) -> None:
        if self._parts.records is not None:
            if plan.record is None:
                self._parts.records.remove(key)
            else:
                self._parts.records.put(plan.record)
        if self._parts.access is not None and plan.redis is None:
            self._parts.access.revoke(key)

    async def _announce(self, model: Object, plan: Plan, outcome: Outcome) -> None:
        await self._parts.announcer.announce(model, plan.events)
        for edit in outcome.hand_edits:
            await self._parts.announcer.once(model, edit)

    def _look_again_s(self, key: str, writes: int) -> float | None:
        """A look that wrote is followed by another; one that never comes to rest, ever more slowly."""
        if not writes:
            self._writing_looks.pop(key, None)
            return None
        looks = self._writing_looks[key] = self._writing_looks.get(key, 0) + 1
        return float(min(_LONGEST_LOOK_AGAIN_S, _FIRST_LOOK_AGAIN_S * 2.0 ** min(looks - 1, 30)))

    def _gone(self, key: str) -> None:
        """The Model is deleted, or another one has its name: nothing of the old one is left here."""
        uid = self._uids.pop(key, "")
        self._writing_looks.pop(key, None)
        self._parts.looks.forget(key)
        self._parts.announcer.forget(uid)
        self._parts.status.forget(uid)
        self._parts.gang_tokens.forget(key)
        if self._parts.records is not None:
            self._parts.records.remove(key)
        if self._parts.autoscaler is not None:
            self._parts.autoscaler.tell(key, None)
        if self._parts.access is not None:
            self._parts.access.revoke(key)
