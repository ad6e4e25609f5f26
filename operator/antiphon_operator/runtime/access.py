"""Redis access of Models: a user of its own for each, whose password stands in a Secret beside the Model.

Passwords are derived from the operator's key, the Model's uid and a rotation value, so none has to be kept or read
back, and an operator that starts anew derives the same. When the rotation changes, the password before stays valid
until the kubelets have surely brought the new Secret to all pods: a mounted Secret follows after a minute or so.
Connections that stand are not touched by either.

The Secret is applied when it is first needed and when its content changes; the operator may not read Secrets, so what
it applied is remembered by this process only.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from antiphon_operator.names import redis_user
from antiphon_operator.plan.observed import Object
from antiphon_operator.plan.planned import RedisAccess
from antiphon_operator.runtime.credentials import password
from antiphon_operator.runtime.objects import key_of, split_key, uid_of
from antiphon_operator.runtime.redis_records import UserAccess

log = logging.getLogger("antiphon.operator.access")

OVERLAP_S = 180.0
"""How long the password before a rotation stays valid."""


class Users(Protocol):
    """The part of `RecordWriter` that keeps users."""

    def put_access(self, access: UserAccess) -> None: ...

    def remove_access(self, user: str) -> None: ...


RenderSecret = Callable[[Object, RedisAccess, str], Mapping[str, Any]]
"""(Model, access, password) -> the Secret."""
ApplyObject = Callable[[Mapping[str, Any]], Awaitable[object]]


@dataclass(slots=True)
class _Granted:
    uid: str
    rotation: str
    before: str | None = None
    before_until: float = 0.0
    secret_digest: str = ""


class Access:
    """See the module's docstring."""

    def __init__(
        self,
        key: bytes,
        users: Users,
        render: RenderSecret,
        apply: ApplyObject,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = key
        self._users = users
        self._render = render
        self._apply = apply
        self._clock = clock
        self._granted: dict[str, _Granted] = {}

    async def grant(self, model: Object, access: RedisAccess) -> float | None:
        """Make user and Secret say what the plan says. Raises what the client raises.

        Answers in how many seconds to call again, to let the password before a rotation expire; None: no need.
        """
        key, uid, now = key_of(model), uid_of(model), self._clock()
        granted = self._granted.get(key)
        if granted is None or granted.uid != uid:
            granted = self._granted[key] = _Granted(uid, access.rotation)
        elif granted.rotation != access.rotation:
            log.info("%s: new Redis password; the one before stays valid for %g s", key, OVERLAP_S)
            granted.before, granted.before_until = granted.rotation, now + OVERLAP_S
            granted.rotation = access.rotation
        if granted.before is not None and now >= granted.before_until:
            granted.before = None
        current = password(self._key, uid, access.rotation)
        rotations = (access.rotation,) if granted.before is None else (access.rotation, granted.before)
        passwords = tuple(password(self._key, uid, rotation) for rotation in rotations)
        # Before the Secret: no pod may see a password that Redis does not know.
        self._users.put_access(UserAccess(access.user, key, passwords))
        digest = hashlib.sha256(f"{access.secret_name} {current}".encode()).hexdigest()
        if granted.secret_digest != digest:
            await self._apply(self._render(model, access, current))
            granted.secret_digest = digest
        return None if granted.before is None else granted.before_until - now

    def revoke(self, key: str) -> None:
        """The Model is gone, or may not reach Redis any more. Its Secret is collected with it."""
        self._granted.pop(key, None)
        self._users.remove_access(redis_user(*split_key(key)))
