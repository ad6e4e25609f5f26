"""What one operator process is made of while it acts: built when it has won the Lease, and given up as a whole.

    kopf ──▶ Feed ──▶ Caches          Looks ◀── wants
                        │               │
                        └──▶ WorkQueue ◀┘ ──▶ Reconciler ──▶ API server, Redis

Six tasks run side by side: kopf's watches, the workers of the queue, the search for ghosts, the writer of records, the
autoscaler, and the wait for the end. None of them ends by itself; one that does ends the process, and a fresh one lists
anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from antiphon_operator.kube.access import ClusterAccess
from antiphon_operator.kube.applying import ensure
from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.resources import SECRETS
from antiphon_operator.options import OperatorContext, OperatorOptions
from antiphon_operator.plan.observed import Object
from antiphon_operator.plan.planned import Apply, RedisAccess
from antiphon_operator.render.common import ray_secret, redis_secret
from antiphon_operator.resource.effective import EffectiveModel, effective_model
from antiphon_operator.resource.model import parse_spec
from antiphon_operator.runtime import handlers
from antiphon_operator.runtime.access import Access
from antiphon_operator.runtime.announcer import Announcer
from antiphon_operator.runtime.applier import Applier
from antiphon_operator.runtime.autoscaler import Autoscaler
from antiphon_operator.runtime.caches import Caches
from antiphon_operator.runtime.feed import Feed
from antiphon_operator.runtime.gang_tokens import GangTokens
from antiphon_operator.runtime.ghosts import Ghosts
from antiphon_operator.runtime.kinds import Watched
from antiphon_operator.runtime.metrics import OperatorMetrics
from antiphon_operator.runtime.objects import metadata, name_of, namespace_of, split_key, uid_of
from antiphon_operator.runtime.queue import WorkQueue
from antiphon_operator.runtime.reconcile import Parts, Planner, Reconciler
from antiphon_operator.runtime.redis_records import RecordWriter
from antiphon_operator.runtime.scaling_store import ScalingStore
from antiphon_operator.runtime.status_writer import StatusWriter
from antiphon_operator.runtime.wants import Looks, Sources

log = logging.getLogger("antiphon.operator")

_WORKERS = 8
"""Models that are looked at side by side; most of a look is waiting for the API server."""
_END_DEADLINE_S = 3.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the acting part is given."""

    options: OperatorOptions
    context: OperatorContext
    access: ClusterAccess
    client: KubeClient
    kinds: Sequence[Watched]
    metrics: OperatorMetrics
    plan: Planner
    sources: Sources
    records: RecordWriter | None
    scaling: ScalingStore | None
    credentials_key: bytes


class ActingOperator:
    """See the module's docstring."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        options, client, metrics = around.options, around.client, around.metrics
        watched = {kind.kind for kind in around.kinds}
        self.caches = Caches(nodes_known="Node" in watched)
        self.queue = WorkQueue()
        self._ghosts = Ghosts(client, self.caches, metrics, around.kinds, options.namespaces)
        self.feed = Feed(self.caches, self.queue.add, self._ghosts.suspect, self._all_known)
        self._looks = Looks(around.sources, self._pods, self.queue.add)
        self._autoscaler = (
            None if around.scaling is None else Autoscaler(around.scaling, self.queue.add, metrics.scaling)
        )
        applier = Applier(client, self.caches, metrics, _now)
        parts = Parts(
            caches=self.caches,
            applier=applier,
            status=StatusWriter(client, self.caches),
            looks=self._looks,
            announcer=Announcer(client),
            metrics=metrics,
            records=around.records,
            autoscaler=self._autoscaler,
            access=None
            if around.records is None or not around.credentials_key
            else Access(around.credentials_key, around.records, _redis_secret, self._apply_secret, _now),
            gang_tokens=GangTokens(_ray_secret, self._create_secret, _now),
        )
        self._reconciler = Reconciler(around.plan, around.context, parts, _now)
        metrics.watch(
            models=lambda: len(self.caches.model_keys()),
            cached_objects=self.caches.size,
            queue_depth=self.queue.depth,
        )

    async def run(self, identity: str, stop: asyncio.Event, watching: Callable[[], None]) -> bool:
        """Act until `stop` is set: True; False if a part ended before. `watching`: kopf took the signal handlers."""
        around = self._around
        parts: dict[str, Coroutine[Any, Any, Any]] = {
            "reconcilers": self.queue.run(self._reconciler.look, _WORKERS),
            "search for ghosts": self._ghosts.run(self.feed),
            "end": stop.wait(),
        }
        if around.records is not None:
            parts["records"] = around.records.run()
        if self._autoscaler is not None:
            parts["autoscaler"] = self._autoscaler.run()
        tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
        # Last, as kopf ends every task that was not there before it.
        registry = handlers.watch_registry(around.kinds, self.feed, around.access)
        settings = handlers.watch_settings(around.kinds)
        kopf_runs = functools.partial(handlers.watch, registry, settings, around.options.namespaces, identity, watching)
        tasks.append(asyncio.create_task(self._list_and_watch(kopf_runs), name="watches"))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and task.get_name() != "end":
                    log.error("the %s ended, and with them this operator", task.get_name(), exc_info=_error(task))
            return stop.is_set()
        finally:
            self.queue.close()
            await self._looks.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_END_DEADLINE_S)

    async def _list_and_watch(self, watch: Callable[[], Awaitable[None]]) -> None:
        await self._ghosts.list_all()
        self.feed.begin()
        await watch()

    def _pods(self, key: str) -> dict[str, Object]:
        model = self.caches.model(key)
        return {} if model is None else {name_of(pod): pod for pod in self.caches.pods(model)}

    def _all_known(self) -> None:
        """What stands in Redis of Models that were deleted while no operator ran is recognised from now on."""
        if self._around.records is None:
            return
        self._around.records.retain_records(self._is_orphan)
        if self._around.credentials_key:
            self._around.records.retain_access(self._is_orphan)

    def _is_orphan(self, key: str) -> bool:
        """Of other namespaces than those that are watched nothing is known, and workers that were started by hand have
        models of their own."""
        if "/" not in key:
            return False
        namespaces = self._around.options.namespaces
        return (not namespaces or split_key(key)[0] in namespaces) and self.caches.model(key) is None

    async def _apply_secret(self, manifest: Object) -> None:
        await ensure(self._around.client, Apply(manifest), None)

    async def _create_secret(self, manifest: Object) -> None:
        await self._around.client.create(SECRETS, manifest["metadata"]["namespace"], manifest)


def _error(task: asyncio.Task[Any]) -> BaseException | None:
    with contextlib.suppress(asyncio.CancelledError):
        return task.exception()
    return None


def _now() -> datetime:
    return datetime.now(UTC)


def _redis_secret(model: Object, access: RedisAccess, password: str) -> Object:
    return redis_secret(_effective(model), password)


def _ray_secret(model: Object, token: str) -> Object:
    return ray_secret(_effective(model), token)


def _effective(model: Object) -> EffectiveModel:
    return effective_model(
        namespace=namespace_of(model),
        name=name_of(model),
        uid=uid_of(model),
        generation=int(metadata(model).get("generation", 0)),
        spec=parse_spec(model.get("spec")),
    )
