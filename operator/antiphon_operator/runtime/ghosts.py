"""Lists all kinds before anything is watched, and later finds objects in the caches that the cluster no longer has.

A watch that was broken off for too long is taken up with a new listing, which shows what is there but not what has
gone. So all kinds are listed once more and compared when kopf has listed one anew, ten seconds after the start (for
what went between our first listing and kopf's), and every ten minutes in any case.
Only objects that were known before our own listing began can be ghosts; what it shows is as good as any look.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.errors import KubeError
from antiphon_operator.runtime.caches import Caches
from antiphon_operator.runtime.feed import Feed
from antiphon_operator.runtime.kinds import Watched
from antiphon_operator.runtime.metrics import OperatorMetrics

log = logging.getLogger("antiphon.operator.ghosts")

PERIOD_S = 600.0
SETTLE_S = 1.0
"""A new listing comes as many events: it is answered once."""
FIRST_CHECK_S = 10.0
"""Within this time of our first listing, kopf has begun to watch every kind."""
_RETRY_S = 10.0
_FIRST_RETRY_S = 1.0


class Ghosts:
    """See the module's docstring. `run` ends when it is cancelled."""

    def __init__(
        self,
        client: KubeClient,
        caches: Caches,
        metrics: OperatorMetrics,
        kinds: Sequence[Watched],
        namespaces: Sequence[str],
        *,
        period_s: float = PERIOD_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._client = client
        self._caches = caches
        self._metrics = metrics
        self._kinds = {watched.kind: watched for watched in kinds}
        self._namespaces = tuple(namespaces)
        self._period_s = period_s
        self._settle_s = settle_s
        self._due_at: dict[str, float] = {}
        self._changed = asyncio.Event()

    def suspect(self) -> None:
        """Compare all kinds soon: one watch was taken up anew, and a kind of which nothing is left cannot tell."""
        for kind in self._kinds:
            self._plan(kind, self._settle_s)

    async def list_all(self) -> None:
        """Fill the caches with all kinds, however long it takes. One after another: whole lists are large, and only
        what the caches keep of one stays in memory."""
        for kind in self._kinds:
            await self._list_first(kind)
        for kind in self._kinds:
            self._plan(kind, FIRST_CHECK_S)

    async def run(self, feed: Feed) -> None:
        loop = asyncio.get_running_loop()
        for kind in self._kinds:
            self._plan(kind, self._period_s)
        while True:
            self._changed.clear()
            now = loop.time()
            for kind in [kind for kind, at in self._due_at.items() if at <= now]:
                self._due_at[kind] = loop.time() + self._period_s
                try:
                    feed.wake_all(await self.compare(kind))
                except KubeError as error:
                    log.warning("%s objects could not be compared, trying again: %s", kind, error)
                    self._plan(kind, _RETRY_S)
            try:
                async with asyncio.timeout_at(min(self._due_at.values())):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def compare(self, kind: str) -> frozenset[str]:
        """List the kind and mend the caches. The keys of the Models that this concerns."""
        watched = self._kinds[kind]
        before = self._caches.uids(kind)
        scopes: Iterable[str | None] = self._namespaces if watched.resource.namespaced and self._namespaces else (None,)
        found: set[str] = set()
        keys: set[str] = set()
        for namespace in scopes:
            for thing in await self._client.list(watched.resource, namespace, labels=watched.labels):
                found.add(str(thing["metadata"]["uid"]))
                keys |= self._caches.put(kind, thing)
        ghosts = before.keys() - found
        for uid in ghosts:
            keys |= self._caches.remove(kind, before[uid])
        if ghosts:
            self._metrics.ghosts.inc(len(ghosts))
            log.info("%d %s objects had gone without a word", len(ghosts), kind)
        return frozenset(keys)

    async def _list_first(self, kind: str) -> None:
        while True:
            try:
                await self.compare(kind)
            except KubeError as error:
                log.warning("%s objects could not be listed, trying again: %s", kind, error)
                await asyncio.sleep(_FIRST_RETRY_S)
            else:
                return

    def _plan(self, kind: str, in_s: float) -> None:
        at = asyncio.get_running_loop().time() + in_s
        if kind in self._kinds and at < self._due_at.get(kind, float("inf")):
            self._due_at[kind] = at
            self._changed.set()
