"""Writes the status of Models and Pools: only what differs, and numbers that drift no more than twice a minute.

A status is written when the cluster's copy does not say the same. What people and machines wait for (conditions,
phase, pools, revision) is written at once. Fields that change all the time under load (`sla`) wait until 30 s have
passed since the last write. Our own writes wake nobody: the caches compare a Model by everything but its status.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.drift import status_patch
from antiphon_operator.kube.resources import MODELS, POOLS
from antiphon_operator.plan.observed import Object
from antiphon_operator.runtime.caches import Caches
from antiphon_operator.runtime.objects import key_of, name_of, namespace_of, uid_of

log = logging.getLogger("antiphon.operator.status")

STEADY_INTERVAL_S = 30.0
_STEADY_FIELDS = frozenset({"sla"})


class StatusWriter:
    """See the module's docstring. Raises what the client raises."""

    def __init__(self, client: KubeClient, caches: Caches, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._caches = caches
        self._clock = clock
        self._written_at: dict[str, float] = {}
        self._not_kept: dict[str, Mapping[str, Any]] = {}

    async def write(self, kind: Literal["Model", "Pool"], live: Object, status: Mapping[str, Any]) -> float | None:
        """Make the status of `live` (a Model or a Pool, as cached) say `status`.

        Answers in how many seconds a change that may wait is due; None: nothing waits.
        """
        patch = status_patch(status, live.get("status"))
        uid, now = uid_of(live), self._clock()
        if patch is None or patch == self._not_kept.get(uid):
            return None
        if patch.keys() <= _STEADY_FIELDS:
            due_at = self._written_at.get(uid, now - STEADY_INTERVAL_S) + STEADY_INTERVAL_S
            if now < due_at:
                return due_at - now
        self._written_at[uid] = now
        resource = MODELS if kind == "Model" else POOLS
        answer = await self._client.patch_status(resource, namespace_of(live), name_of(live), patch)
        self._caches.put(kind, answer)
        self._remember_what_was_not_kept(kind, answer, status)
        return None

    def _remember_what_was_not_kept(self, kind: str, answer: Object, status: Mapping[str, Any]) -> None:
        """An older CRD drops fields that it does not know: writing them again would drop them again."""
        uid = uid_of(answer)
        missing = status_patch(status, answer.get("status"))
        if missing is None:
            self._not_kept.pop(uid, None)
            return
        self._not_kept[uid] = missing
        log.warning(
            "status of %s %s: the API server does not keep %s: upgrade the CustomResourceDefinitions with the chart",
            kind,
            key_of(answer),
            ", ".join(sorted(missing)),
        )

    def forget(self, uid: str) -> None:
        self._written_at.pop(uid, None)
        self._not_kept.pop(uid, None)
