"""When a Secret has to be written again by somebody who may not read it.

The operator may not read Secrets, so it never sees that one was deleted or changed by hand. It writes one when its
content changes, every hour or so, and for each pod that has waited for its volumes for too long, once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from antiphon_operator.plan.observed import Object
from antiphon_operator.runtime.mounting import mounting_since
from antiphon_operator.runtime.objects import key_of, uid_of

log = logging.getLogger("antiphon.operator.upkeep")

AGAIN_AFTER = timedelta(hours=1)
"""At the latest. Each Model has its own time within the last quarter of it, so that they do not come all at once."""
STUCK_AFTER = timedelta(seconds=20)
"""A pod that is still without containers then may lack the Secret."""


@dataclass(slots=True)
class _Written:
    """The Secret, as it was written last."""

    digest: str
    at: datetime
    for_pods: set[str] = field(default_factory=set)
    """Uids of pods that it was written for once more, or that were stuck when it was written anyway."""


class SecretUpkeep:
    """One Secret of each Model. See the module's docstring."""

    def __init__(self, what: str, now: Callable[[], datetime]) -> None:
        """`what`: the Secret, as the log calls it."""
        self._what = what
        self._now = now
        self._written: dict[str, _Written] = {}

    async def keep(
        self, model: Object, digest: str, pods: Sequence[Object], write: Callable[[], Awaitable[object]]
    ) -> float:
        """Write it if it is time to. `digest`: of its content; `pods`: the Model's. Raises what `write` raises.

        Answers in how many seconds to call again.
        """
        key, uid, now = key_of(model), uid_of(model), self._now()
        mounting = {uid_of(pod): since for pod in pods if (since := mounting_since(pod)) is not None}
        stuck = {pod for pod, since in mounting.items() if now - since >= STUCK_AFTER}
        written, again_after = self._written.get(key), _again_after(uid)
        if written is not None and (written.digest != digest or now - written.at >= again_after):
            written = None
        if written is not None and not stuck <= written.for_pods:
            log.info("%s: pods wait for their volumes: the %s Secret is written once more", key, self._what)
            written = None
        if written is None:
            await write()
            written = self._written[key] = _Written(digest, now)
        written.for_pods = (written.for_pods & mounting.keys()) | stuck
        coming = [since + STUCK_AFTER for pod, since in mounting.items() if pod not in stuck]
        return (min([written.at + again_after, *coming]) - now).total_seconds()

    def forget(self, key: str) -> None:
        """The Model is gone, or needs none any more. Its Secret is collected with it."""
        self._written.pop(key, None)


def _again_after(uid: str) -> timedelta:
    share = int.from_bytes(hashlib.sha256(uid.encode()).digest()[:2]) / 0x10000
    return AGAIN_AFTER * (0.75 + share / 4)
