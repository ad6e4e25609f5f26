"""Writes the status of Models and Pools: only what differs, and what drifts no more than twice a minute.

A status is written when the cluster's copy does not say the same. What people and machines wait for (a condition's
status or reason, phase, pools, revision) is written at once. What changes all the time under load waits until 30 s have
passed since the last write: the numbers of `sla`, and numbers within a condition's message. A message that says
something else in words under the same reason (such as the last line of a crashed container, which comes a moment after
the reason) is written at once too, but once after each change of state, and else once in 30 s: messages may quote
anything, so they alone never set the pace.
Our own writes wake nobody: the caches compare a Model by everything but its status.
"""

from __future__ import annotations

import enum
import logging
import re
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
_STEADY_FIELDS = frozenset({"sla", "conditions"})
_NUMBERS = re.compile(r"\d+(\.\d+)?")


class _News(enum.Enum):
    """What a patch would tell."""

    NUMBERS = enum.auto()
    WORDS = enum.auto()
    STATE = enum.auto()


class StatusWriter:
    """See the module's docstring. Raises what the client raises."""

    def __init__(self, client: KubeClient, caches: Caches, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._caches = caches
        self._clock = clock
        self._written_at: dict[str, float] = {}
        self._worded_at: dict[str, float] = {}
        self._not_kept: dict[str, Mapping[str, Any]] = {}

    async def write(self, kind: Literal["Model", "Pool"], live: Object, status: Mapping[str, Any]) -> float | None:
        """Make the status of `live` (a Model or a Pool, as cached) say `status`.

        Answers in how many seconds a change that may wait is due; None: nothing waits.
        """
        there: Mapping[str, Any] = live.get("status") or {}
        patch = status_patch(status, there)
        uid, now = uid_of(live), self._clock()
        if patch is None or patch == self._not_kept.get(uid):
            return None
        news = _news(patch, there)
        since = {_News.NUMBERS: self._written_at, _News.WORDS: self._worded_at}.get(news, {})
        due_at = since.get(uid, now - STEADY_INTERVAL_S) + STEADY_INTERVAL_S
        if now < due_at:
            return due_at - now
        self._written_at[uid] = now
        if news is _News.WORDS:
            self._worded_at[uid] = now
        elif news is _News.STATE:
            self._worded_at.pop(uid, None)
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
        self._worded_at.pop(uid, None)
        self._not_kept.pop(uid, None)


def _news(patch: Mapping[str, Any], there: Mapping[str, Any]) -> _News:
    if not patch.keys() <= _STEADY_FIELDS:
        return _News.STATE
    if "conditions" not in patch:
        return _News.NUMBERS
    before, after = there.get("conditions") or (), patch["conditions"] or ()
    if [_state(condition) for condition in before] != [_state(condition) for condition in after]:
        return _News.STATE
    if [_words(condition) for condition in before] != [_words(condition) for condition in after]:
        return _News.WORDS
    return _News.NUMBERS


def _state(condition: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in condition.items() if field != "message"}


def _words(condition: Mapping[str, Any]) -> str:
    return _NUMBERS.sub("0", str(condition.get("message", "")))
