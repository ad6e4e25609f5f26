"""From the name that a client says to a model and the workers that serve it."""

from __future__ import annotations

import time

from antiphon_gateway import errors, pages
from antiphon_gateway.calls import Call
from antiphon_gateway.dispatch import Dispatcher, no_worker
from antiphon_gateway.fleet import Fleet
from antiphon_gateway.flight import Target
from antiphon_gateway.groups import Group
from antiphon_gateway.keep_alive import KeepAlive
from antiphon_gateway.models import ModelRegistry
from antiphon_gateway.options import GatewayOptions

_BYTES_PER_TOKEN = 4
"""Of a body, about, where there is nobody yet to tokenise it."""


class ModelFinder:
    """See the module. It waits where a Model is waking, until `ending` is set."""

    def __init__(
        self,
        options: GatewayOptions,
        fleet: Fleet,
        models: ModelRegistry,
        dispatcher: Dispatcher,
        keep_alive: KeepAlive,
    ) -> None:
        self.ending = False
        """Draining took too long: nobody waits any more."""
        self._options = options
        self._fleet = fleet
        self._models = models
        self._dispatcher = dispatcher
        self._keep_alive = keep_alive

    async def target(self, name: str, call: Call) -> Target:
        """What the client means. Waits where the Model is waking. Raises ApiError (404, 429, 503) and ClientGone."""
        catalogue = self._fleet.catalogue
        while True:
            key = self._key(name)
            record = catalogue.record(key)
            group = self._dispatcher.selection.choose(key)
            if group is None and record is not None and record.waking:
                await self._wait_for_worker(name, key, call)
                continue
            model = self._models.get(key) if group is None else self._models.by_digest(group.card_digest)
            if model is None:
                raise no_worker(name, record)
            return Target(
                name=name,
                # Without workers: whatever is wrong with the request itself is said first.
                group=group or Group(key, "", model.digest),
                model=model,
                max_context_tokens=pages.context_limit(model, record.max_context_tokens if record is not None else 0),
                salt=b"" if record is not None and record.isolation == "Shared" else call.ticket.salt,
                takes_templates=self._options.trust_request_chat_template,
            )

    def known_target(self, name: str, salt: bytes) -> Target:
        """What the client means, whether or not anybody serves it now. Raises ApiError (404, 503)."""
        key = self._key(name)
        record, model = self._fleet.catalogue.record(key), self._models.get(key)
        if model is None:
            raise no_worker(name, record)
        limit = pages.context_limit(model, record.max_context_tokens if record is not None else 0)
        return Target(name, Group(key, "", model.digest), model, limit, salt, self._options.trust_request_chat_template)

    def _key(self, name: str) -> str:
        """The model that `name` means. Raises ApiError (404, 503)."""
        catalogue = self._fleet.catalogue
        key = catalogue.key_of(name)
        if key is not None:
            return key
        if catalogue.record(name) is None:
            if self._models.get(name) is not None:
                return name
            if name in self._fleet.announced_models():
                raise errors.no_worker(name, "none of its workers can be reached")
        raise errors.model_not_found(name)

    async def _wait_for_worker(self, name: str, key: str, call: Call) -> None:
        """Return when something has changed for the model. Raises ApiError (429, 503) and ClientGone."""
        if self.ending:
            raise errors.draining()
        lobby, options, record = self._dispatcher.lobby, self._options, self._fleet.catalogue.record(key)
        tokens = len(call.raw) // _BYTES_PER_TOKEN
        # One alone always may wait, however long it is.
        if self._dispatcher.waiting >= options.queue_size or (
            len(lobby) and lobby.tokens + tokens > options.queue_tokens
        ):
            retry_after_s = record.retry_after_s if record is not None else 1
            raise errors.too_many_held(name, options.queue_size, retry_after_s=retry_after_s)
        wait_s = min(options.wake_timeout_s, call.ticket.wishes.timeout_s or options.wake_timeout_s)
        remaining_s = call.ticket.arrived_at + wait_s - time.monotonic()
        with lobby.place(key, tokens) as changed, self._keep_alive.waiting(call):
            if remaining_s > 0 and await call.presence.until(changed, remaining_s):
                call.woken_at = time.monotonic()
                return
        raise no_worker(name, self._fleet.catalogue.record(key), waited_s=wait_s)
