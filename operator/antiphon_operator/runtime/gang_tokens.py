"""The token by which the pods of a Model's gangs know each other, in a Secret beside the Model.

Whoever holds it may start processes in the gang's pods, so it is the Model's own, and 32 random bytes. Nobody has to
know it but the pods: the operator makes it, creates the Secret, and forgets it. Creating never replaces one that is
there, so a gang that is starting has one token, whichever operator acts; one that was deleted is made anew with
another token, which gangs that start later use.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from antiphon_operator.kube.errors import AlreadyExists
from antiphon_operator.plan.observed import Object
from antiphon_operator.runtime.objects import uid_of
from antiphon_operator.runtime.upkeep import SecretUpkeep

RenderToken = Callable[[Object, str], Mapping[str, Any]]
"""(Model, token) -> the Secret."""
CreateObject = Callable[[Mapping[str, Any]], Awaitable[object]]
"""Raises AlreadyExists."""


class GangTokens:
    """See the module's docstring."""

    def __init__(
        self,
        render: RenderToken,
        create: CreateObject,
        now: Callable[[], datetime],
        make_token: Callable[[], str] = secrets.token_hex,
    ) -> None:
        self._render = render
        self._create = create
        self._make_token = make_token
        self._upkeep = SecretUpkeep("gang token's", now)

    async def grant(self, model: Object, secret_name: str, pods: Sequence[Object]) -> float:
        """See to it that there is a token. `pods`: the Model's. Raises what the client raises.

        Answers in how many seconds to call again.
        """

        async def create() -> None:
            with contextlib.suppress(AlreadyExists):
                await self._create(self._render(model, self._make_token()))

        return await self._upkeep.keep(model, f"{uid_of(model)} {secret_name}", pods, create)

    def forget(self, key: str) -> None:
        """The Model is gone, or has no gang any more. The Secret is collected with the Model."""
        self._upkeep.forget(key)
