"""Kubernetes Events about Models: each thing is said once, repetitions are counted, and nobody can flood the cluster.

The planner is level-triggered and says in every plan what it has to say. As long as plan after plan says the same, it
is one occurrence. When it was gone and comes back, that is another, and the Event in the cluster is counted up, at most
once a minute. Beside that each Model may post ten Events at once and one every 15 seconds: what is beyond is
counted only. An Event that cannot be posted is logged and forgotten: it decides nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.errors import KubeError
from antiphon_operator.plan.observed import Object
from antiphon_operator.plan.planned import Announce
from antiphon_operator.runtime.objects import key_of, uid_of

log = logging.getLogger("antiphon.operator.events")

_REPEAT_AFTER_S = 60.0
_BURST = 10.0
_REFILL_S = 15.0
_REMEMBERED = 64
"""Different things said about one Model that are remembered; the one said longest ago is forgotten first."""


@dataclass(slots=True)
class _Said:
    unposted: int = 0
    posted_at: float = float("-inf")


@dataclass(slots=True)
class _About:
    said: dict[Announce, _Said] = field(default_factory=dict)
    current: frozenset[Announce] = frozenset()
    tokens: float = _BURST
    refilled_at: float = 0.0


class Announcer:
    """See the module's docstring."""

    def __init__(self, client: KubeClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._about: dict[str, _About] = {}

    async def announce(self, model: Object, standing: Sequence[Announce]) -> None:
        """`standing`: all that the newest plan says. What it no longer says has ended."""
        now_said = frozenset(standing)
        about = self._about.get(uid_of(model))
        if about is None:
            if not now_said:
                return
            about = self._about[uid_of(model)] = _About(refilled_at=self._clock())
        begun = [announce for announce in standing if announce not in about.current]
        about.current = now_said
        for announce in begun:
            await self.once(model, announce)

    async def once(self, model: Object, announce: Announce) -> None:
        """Something happened now, such as a hand edit that was put back."""
        now = self._clock()
        about = self._about.setdefault(uid_of(model), _About(refilled_at=now))
        said = about.said.pop(announce, None) or _Said()
        about.said[announce] = said
        while len(about.said) > _REMEMBERED:
            about.said.pop(next(iter(about.said)))
        said.unposted += 1
        about.tokens = min(_BURST, about.tokens + (now - about.refilled_at) / _REFILL_S)
        about.refilled_at = now
        if now - said.posted_at < _REPEAT_AFTER_S or about.tokens < 1.0:
            return
        about.tokens -= 1.0
        said.posted_at = now
        try:
            await self._client.post_event(model, announce.kind, announce.reason, announce.message, count=said.unposted)
            said.unposted = 0
        except KubeError as error:
            log.warning("%s: the event %s could not be posted: %s", key_of(model), announce.reason, error)

    def forget(self, uid: str) -> None:
        self._about.pop(uid, None)
