"""Redis access of Models: a user of its own for each, whose password stands in a Secret beside the Model.

Passwords are derived from the operator's key, the Model's uid and a rotation value, so none has to be kept or read
back, and an operator that starts anew derives the same. How long the password before a rotation stays valid is kept
beside the users (`redis_users`).

The operator may not read Secrets: when the Secret is applied again, `upkeep` says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from antiphon_operator.names import redis_user
from antiphon_operator.plan.observed import Object
from antiphon_operator.plan.planned import RedisAccess
from antiphon_operator.runtime.credentials import password
from antiphon_operator.runtime.objects import key_of, split_key, uid_of
from antiphon_operator.runtime.redis_records import UserAccess
from antiphon_operator.runtime.upkeep import SecretUpkeep


class Users(Protocol):
    """The part of `RecordWriter` that keeps users."""

    def put_access(self, access: UserAccess) -> None: ...

    def remove_access(self, user: str) -> None: ...


RenderSecret = Callable[[Object, RedisAccess, str], Mapping[str, Any]]
"""(Model, access, password) -> the Secret."""
ApplyObject = Callable[[Mapping[str, Any]], Awaitable[object]]


class Access:
    """See the module's docstring."""

    def __init__(
        self, key: bytes, users: Users, render: RenderSecret, apply: ApplyObject, now: Callable[[], datetime]
    ) -> None:
        self._key = key
        self._users = users
        self._render = render
        self._apply = apply
        self._upkeep = SecretUpkeep("Redis", now)

    async def grant(self, model: Object, access: RedisAccess, pods: Sequence[Object]) -> float:
        """Make user and Secret say what the plan says. `pods`: the Model's. Raises what the client raises.

        Answers in how many seconds to call again.
        """
        key, uid = key_of(model), uid_of(model)
        current = password(self._key, uid, access.rotation)
        # Before the Secret: no pod may see a password that Redis does not know.
        self._users.put_access(UserAccess(access.user, key, uid, current))
        digest = hashlib.sha256(f"{uid} {access.secret_name} {current}".encode()).hexdigest()
        return await self._upkeep.keep(model, digest, pods, lambda: self._apply(self._render(model, access, current)))

    def revoke(self, key: str) -> None:
        """The Model is gone, or may not reach Redis any more. Its Secret is collected with it."""
        self._upkeep.forget(key)
        self._users.remove_access(redis_user(*split_key(key)))
