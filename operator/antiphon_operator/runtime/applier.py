"""Carries out the objects of a plan: applies what differs, then deletes.

Objects of one kind that stand together in the plan are applied side by side, kinds one after another in the plan's
order, so that a StatefulSet never comes before the ControllerRevision that it is made from. When one fails, its group
is finished and the later groups are left for the next look, as they may rest on it; only where nothing rests on a kind
(PodMonitor, PodDisruptionBudget, NetworkPolicy) the plan goes on. Deletes were decided from what was observed, so they
are carried out in any case: a quota may be waiting for just that.

An object that already says what is wanted costs no request. One that somebody edited by hand, in fields that are ours,
is put back, and an Event on the Model names the fields. A Pool's number may be a scaler's, and the plan was made from
the number that stood there: it is applied to the Pool that the plan has seen, or not at all.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from antiphon_operator.kube.applying import ensure
from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.drift import changed_fields
from antiphon_operator.kube.errors import KubeError
from antiphon_operator.kube.resources import resource_of
from antiphon_operator.plan.observed import Object
from antiphon_operator.plan.planned import Announce, Apply, Delete, Plan
from antiphon_operator.runtime.caches import Caches
from antiphon_operator.runtime.metrics import OperatorMetrics
from antiphon_operator.runtime.objects import is_deleting, key_of, name_of, namespace_of

log = logging.getLogger("antiphon.operator.applier")

_NOTHING_RESTS_ON = frozenset({"PodMonitor", "PodDisruptionBudget", "NetworkPolicy"})
_SCALED_BY_OTHERS = frozenset({"Pool"})
_NAMED_FIELDS = 5
_AT_ONCE_PER_MODEL = 4


@dataclass(frozen=True, slots=True)
class Failure:
    """One object that could not be applied or deleted."""

    what: str
    """`StatefulSet qwen-decode-3f2a1b-x7k2`"""
    error: KubeError

    @property
    def kind(self) -> str:
        return self.what.partition(" ")[0]


@dataclass(slots=True)
class Outcome:
    """What came of a plan's objects."""

    writes: int = 0
    failures: list[Failure] = field(default_factory=list)
    hand_edits: list[Announce] = field(default_factory=list)


class Applier:
    """See the module's docstring. `at_once` bounds the writing requests of the whole operator."""

    def __init__(
        self,
        client: KubeClient,
        caches: Caches,
        metrics: OperatorMetrics,
        now: Callable[[], datetime],
        *,
        at_once: int = 16,
    ) -> None:
        self._client = client
        self._caches = caches
        self._metrics = metrics
        self._now = now
        self._slots = asyncio.Semaphore(at_once)

    async def carry_out(self, model: Object, plan: Plan) -> Outcome:
        outcome = Outcome()
        seen = {name_of(child): child for child in self._caches.children(model) if child["kind"] in _SCALED_BY_OTHERS}
        for kind, group in itertools.groupby(plan.applies, key=lambda apply: str(apply.manifest["kind"])):
            known = len(outcome.failures)
            await _all(self._apply(model, apply, outcome, seen) for apply in group)
            if len(outcome.failures) > known and kind not in _NOTHING_RESTS_ON:
                break
        await _all(self._delete(model, delete, outcome) for delete in plan.deletes)
        return outcome

    async def _apply(self, model: Object, wanted: Apply, outcome: Outcome, seen: Mapping[str, Object]) -> None:
        kind, name = str(wanted.manifest["kind"]), str(wanted.manifest["metadata"]["name"])
        shared = kind in _SCALED_BY_OTHERS
        live = seen.get(name) if shared else self._caches.child(model, kind, name)
        edited = changed_fields(wanted, live) if live is not None else []
        try:
            async with self._slots:
                answer = await ensure(self._client, wanted, live, only_as_seen=shared)
        except KubeError as error:
            outcome.failures.append(Failure(f"{kind} {name}", error))
            return
        if answer is None:
            return
        self._caches.put(kind, answer)
        outcome.writes += 1
        if edited:
            self._metrics.hand_edits.inc()
            outcome.hand_edits.append(_put_back(kind, name, edited))
        log.info("%s: applied %s %s%s", key_of(model), kind, name, f" (put back {', '.join(edited)})" if edited else "")

    async def _delete(self, model: Object, wanted: Delete, outcome: Outcome) -> None:
        resource = resource_of(wanted.api_version, wanted.kind)
        live = self._caches.look(wanted.kind, wanted.uid)
        if live is not None and is_deleting(live):
            return
        try:
            async with self._slots:
                await self._client.delete(
                    resource, namespace_of(model), wanted.name, uid=wanted.uid, propagation=wanted.propagation
                )
        except KubeError as error:
            outcome.failures.append(Failure(f"{wanted.kind} {wanted.name}", error))
            return
        self._caches.mark_deleting(wanted.kind, wanted.uid, self._now())
        outcome.writes += 1
        log.info("%s: deleted %s %s", key_of(model), wanted.kind, wanted.name)


def _put_back(kind: str, name: str, fields: Sequence[str]) -> Announce:
    shown = ", ".join(fields[:_NAMED_FIELDS])
    more = f" and {len(fields) - _NAMED_FIELDS} more" if len(fields) > _NAMED_FIELDS else ""
    return Announce(
        kind="Normal",
        reason="HandEditPutBack",
        message=f"{kind} {name}: put back {shown}{more}; the operator owns these fields, so change the Model instead.",
    )


async def _all(actions: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Some of one Model's requests at a time."""
    own = asyncio.Semaphore(_AT_ONCE_PER_MODEL)

    async def one(action: Coroutine[Any, Any, None]) -> None:
        async with own:
            await action

    async with asyncio.TaskGroup() as group:
        for action in actions:
            group.create_task(one(action))
