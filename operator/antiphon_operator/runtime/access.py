"""Redis access of Models: a user of its own for each, whose password stands in a Secret beside the Model.

Passwords are derived from the operator's key, the Model's uid and a rotation value, so none has to be kept or read
back, and an operator that starts anew derives the same. How long the password before a rotation stays valid is kept
beside the users (`redis_users`).

The operator may not read Secrets, so it never sees that one was deleted or changed by hand. It applies the Secret when
its content changes, every hour or so, and for each pod that has waited for its volumes for too long, once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from antiphon_operator.names import redis_user
from antiphon_operator.plan.observed import Object
from antiphon_operator.plan.planned import RedisAccess
from antiphon_operator.runtime.credentials import password
from antiphon_operator.runtime.mounting import mounting_since
from antiphon_operator.runtime.objects import key_of, split_key, uid_of
from antiphon_operator.runtime.redis_records import UserAccess

log = logging.getLogger("antiphon.operator.access")

AGAIN_AFTER = timedelta(hours=1)
"""At the latest. Each Model has its own time within the last quarter of it, so that they do not come all at once."""
STUCK_AFTER = timedelta(seconds=20)
"""A pod that is still without containers then may lack the Secret."""


class Users(Protocol):
    """The part of `RecordWriter` that keeps users."""

    def put_access(self, access: UserAccess) -> None: ...

    def remove_access(self, user: str) -> None: ...


RenderSecret = Callable[[Object, RedisAccess, str], Mapping[str, Any]]
"""(Model, access, password) -> the Secret."""
ApplyObject = Callable[[Mapping[str, Any]], Awaitable[object]]


@dataclass(slots=True)
class _Applied:
    """The Secret, as it was applied last."""

    digest: str
    at: datetime
    for_pods: set[str] = field(default_factory=set)
    """Uids of pods that it was applied for once more, or that were stuck when it was applied anyway."""


class Access:
    """See the module's docstring."""

    def __init__(
        self, key: bytes, users: Users, render: RenderSecret, apply: ApplyObject, now: Callable[[], datetime]
    ) -> None:
        self._key = key
        self._users = users
        self._render = render
        self._apply = apply
        self._now = now
        self._applied: dict[str, _Applied] = {}

    async def grant(self, model: Object, access: RedisAccess, pods: Sequence[Object]) -> float:
        """Make user and Secret say what the plan says. `pods`: the Model's. Raises what the client raises.

        Answers in how many seconds to call again.
        """
        key, uid, now = key_of(model), uid_of(model), self._now()
        current = password(self._key, uid, access.rotation)
        # Before the Secret: no pod may see a password that Redis does not know.
        self._users.put_access(UserAccess(access.user, key, uid, current))
        mounting = {uid_of(pod): since for pod in pods if (since := mounting_since(pod)) is not None}
        stuck = {pod for pod, since in mounting.items() if now - since >= STUCK_AFTER}
        digest = hashlib.sha256(f"{uid} {access.secret_name} {current}".encode()).hexdigest()
        applied, again_after = self._applied.get(key), _again_after(uid)
        if applied is not None and (applied.digest != digest or now - applied.at >= again_after):
            applied = None
        if applied is not None and not stuck <= applied.for_pods:
            log.info("%s: pods wait for their volumes: the Redis Secret is applied once more", key)
            applied = None
        if applied is None:
            await self._apply(self._render(model, access, current))
            applied = self._applied[key] = _Applied(digest, now)
        applied.for_pods = (applied.for_pods & mounting.keys()) | stuck
        coming = [since + STUCK_AFTER for pod, since in mounting.items() if pod not in stuck]
        return (min([applied.at + again_after, *coming]) - now).total_seconds()

    def revoke(self, key: str) -> None:
        """The Model is gone, or may not reach Redis any more. Its Secret is collected with it."""
        self._applied.pop(key, None)
        self._users.remove_access(redis_user(*split_key(key)))


def _again_after(uid: str) -> timedelta:
    share = int.from_bytes(hashlib.sha256(uid.encode()).digest()[:2]) / 0x10000
    return AGAIN_AFTER * (0.75 + share / 4)
