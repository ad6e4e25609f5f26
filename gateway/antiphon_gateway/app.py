"""The gateway as an application: its parts, its paths, and who may ask what.

Written by hand, as what a framework adds per request and per chunk is more than all that is done here. What generates
lives in `generating`; the forms in which it is asked for are in `fronts`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

import msgspec
from antiphon_kvtransfer import RedisAccess
from prometheus_client import CONTENT_TYPE_LATEST

from antiphon_gateway import (
    errors,
    explain_page,
    index_page,
    messages,
    messages_body,
    openapi,
    openapi_page,
    pages,
    responses,
    schema,
    token_pages,
)
from antiphon_gateway.auth import ApiKeys, cache_salt
from antiphon_gateway.client_request import ClientHead, ClientRequest
from antiphon_gateway.cors import CrossOrigin
from antiphon_gateway.dispatch import Dispatcher
from antiphon_gateway.error_forms import MESSAGES_PATH
from antiphon_gateway.errors import ApiError
from antiphon_gateway.explain_store import ExplainStore
from antiphon_gateway.finding import ModelFinder
from antiphon_gateway.fleet import Fleet
from antiphon_gateway.fronts import Fronts
from antiphon_gateway.generating import Generation, new_id
from antiphon_gateway.grammar_checks import GrammarChecks
from antiphon_gateway.http import JSON_TYPE, ClientGone
from antiphon_gateway.keep_alive import KeepAlive
from antiphon_gateway.metrics import GatewayMetrics
from antiphon_gateway.models import ModelRegistry
from antiphon_gateway.options import GatewayOptions
from antiphon_gateway.parameters import ignored_header
from antiphon_gateway.responses_store import ResponseStore
from antiphon_gateway.scaling_demand import Demand
from antiphon_gateway.scaling_news import NewsDesk
from antiphon_gateway.scaling_writer import ScalingWriter
from antiphon_gateway.tokenization import TextWorkers
from antiphon_gateway.tokenization_cache import EncodingCache
from antiphon_gateway.tools import Dialects

log = logging.getLogger("antiphon.gateway")

Handler: TypeAlias = Callable[[ClientRequest], Awaitable[None]]

_REQUEST_ID = re.compile(r"^[A-Za-z0-9._:\-]{1,128}$")
_MODELS = "/v1/models/"
_RESPONSES = f"{responses.PATH}/"
_SWEEP_S = 1.0


class Gateway:
    """See the module. `start` and `close` belong to the server."""

    def __init__(
        self,
        options: GatewayOptions,
        keys: ApiKeys,
        gateway_id: str,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw` gives numbers in [0, 1): all the randomness there is in where requests go.

        Raises CorsOriginInvalid.
        """
        self.options = options
        encodings = EncodingCache(options.encoding_cache_bytes) if options.encoding_cache_bytes > 0 else None
        self.models = ModelRegistry(encodings)
        self.dialects = Dialects(options.tool_parser, options.reasoning_parser)
        self.metrics = GatewayMetrics()
        self.fleet = Fleet(options, gateway_id, self.models)
        self.dispatcher = Dispatcher(self.fleet, options, self.metrics, draw)
        self.explain = ExplainStore(options.explain_requests, options.explain_max_bytes, gateway_id)
        self.responses = ResponseStore(options.responses_stored, options.responses_max_bytes, options.responses_keep_s)
        self._keys = keys
        self._cross_origin = CrossOrigin(options.cors_origin) if options.cors_origin else None
        self.text = TextWorkers()
        self.grammar_checks = GrammarChecks()
        self.demand = Demand()
        keep_alive = KeepAlive(options.keep_alive_s, options.keep_alive_first_s)
        self.generation = Generation(
            options, keys, gateway_id, self.dispatcher, self.metrics, self.explain, self.demand, keep_alive
        )
        self._finder = ModelFinder(options, self.fleet, self.models, self.dispatcher, keep_alive)
        self._fronts = Fronts(
            options, self._finder, self.dialects, self.grammar_checks, self.text, self.responses, self.metrics
        )
        self._sweeper: asyncio.Task[None] | None = None
        self._scaling: ScalingWriter | None = None
        self._scaling_task: asyncio.Task[None] | None = None
        desk = NewsDesk(gateway_id, self.fleet, self.dispatcher, self.demand, lambda: self.generation.flights)
        if options.redis_url:
            access = RedisAccess(options.redis_url, options.redis_username, options.redis_password_file)
            self._scaling = ScalingWriter(access, gateway_id, desk)
            self.dispatcher.lobby.on_held = self._scaling.at_once
        self.metrics.observe_scaling(desk.news, self.fleet.catalogue.record)
        self._routes: Mapping[str, Mapping[str, Handler]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completions},
            MESSAGES_PATH: {"POST": self._messages},
            f"{MESSAGES_PATH}/count_tokens": {"POST": self._count_tokens},
            responses.PATH: {"POST": self._responses},
            "/v1/models": {"GET": self._list_models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            index_page.PATH: {"GET": self._index},
            openapi.PATH: {"GET": self._openapi},
            openapi.PAGE_PATH: {"GET": self._docs},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics},
        }
        self.metrics.observe(
            in_flight=lambda: self.generation.in_flight,
            queue_depth=lambda: self.dispatcher.waiting,
            workers=lambda: len(self.fleet.workers()),
            encodings=encodings,
        )

    # -- life

    def start(self) -> None:
        """Begin to look for workers. Needs a running loop."""
        self.fleet.start()
        self._sweeper = asyncio.create_task(self._sweep(), name="sweeper")
        if self._scaling is not None:
            self._scaling_task = asyncio.create_task(self._scaling.run(), name="scaling-news")

    async def close(self) -> None:
        for task in (self._sweeper, self._scaling_task):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._scaling is not None:
            await self._scaling.close()
        await self.fleet.close()
        self.text.close()
        self.grammar_checks.close()

    @property
    def paths(self) -> tuple[str, ...]:
        """Those that are there as they are; below some of them there are more."""
        return tuple(self._routes)

    @property
    def draining(self) -> bool:
        """It answers what it has, and refuses what is new."""
        return self.generation.draining

    @property
    def in_flight(self) -> int:
        """Generating requests that have not been answered to the end."""
        return self.generation.in_flight

    def drain(self) -> None:
        """Refuse what is new from now on."""
        self.generation.draining = True

    async def drained(self) -> None:
        """Return when no generating request is left. The caller bounds the wait."""
        await self.generation.drained()

    def end_all(self) -> None:
        """End every running request with an error that its client sees."""
        self._finder.ending = True
        self.dispatcher.lobby.call_all()
        self.generation.end_all()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.responses.expire()
            self.generation.sweep()

    @property
    def ready(self) -> bool:
        """Whether at least one model can be served now (or, in a cluster, whether all is as it should be)."""
        return self._ready_page().ready

    # -- requests

    def check_key(self, head: ClientHead) -> None:
        """Of somebody who asks for something. Raises ApiError (401)."""
        _take_key(head)
        self._keys.tenant(head.header(b"authorization"))

    async def handle(self, request: ClientRequest) -> None:
        """Answer it. What goes wrong is answered or logged; nothing is raised but where the answer cannot be sent."""
        given = request.header(b"x-request-id")
        request.request_id = given if given and _REQUEST_ID.match(given) else f"req-{new_id()}"
        _take_key(request)
        if self._cross_origin is not None:
            request.standing_headers = self._cross_origin.headers(request)
            if await self._cross_origin.answered(request, self._methods(request.path)):
                return
        try:
            await self._handler(request)(request)
        except ApiError as error:
            if error.status == 413:
                log.warning("request %s: %s", request.request_id, error.message)
                self.metrics.body_too_large()
            await self._fail(request, error)
        except ClientGone:
            log.debug("request %s: the client went away", request.request_id)
        except Exception:
            log.exception("request %s failed by a fault of this gateway", request.request_id)
            await self._fail(request, errors.internal())

    async def _fail(self, request: ClientRequest, error: ApiError) -> None:
        if request.started:
            await request.send(request.error_event(error), last=True)
        elif error.status == 405:
            allowed = ", ".join(self._methods(request.path)).encode()
            await request.respond_error(error, (b"allow", allowed))
        elif self.draining:
            await request.respond_error(error, (b"connection", b"close"))
        else:
            await request.respond_error(error)

    def _methods(self, path: str) -> Mapping[str, Handler]:
        if path.startswith(_MODELS) and len(path) > len(_MODELS):
            return {"GET": self._show_model}
        if path.startswith(_RESPONSES) and len(path) > len(_RESPONSES) and "/" not in path[len(_RESPONSES) :]:
            return {"GET": self._show_response, "DELETE": self._delete_response}
        if path.startswith(explain_page.PATH) and len(path) > len(explain_page.PATH):
            return {"GET": self._explain}
        if path.startswith(f"{index_page.PATH}/") and len(path) > len(index_page.PATH) + 1:
            return {"GET": self._index_of_worker}
        return self._routes.get(path, {})

    def _handler(self, request: ClientRequest) -> Handler:
        methods = self._methods(request.path)
        handler = methods.get(request.method)
        if handler is not None:
            return handler
        if not methods:
            raise errors.unknown_url(request.method, request.path)
        raise errors.method_not_allowed(request.method, request.path, ", ".join(methods))

    # -- small pages

    async def _health(self, request: ClientRequest) -> None:
        await request.respond(200, b'{"status":"ok"}', JSON_TYPE)

    async def _ready(self, request: ClientRequest) -> None:
        page = self._ready_page()
        await request.respond(200 if page.ready else 503, msgspec.json.encode(page), JSON_TYPE)

    def _ready_page(self) -> pages.Ready:
        return pages.ready_page(
            self.fleet,
            self.dispatcher.selection,
            draining=self.draining,
            ready_without_workers=self.options.ready_without_workers,
        )

    async def _metrics(self, request: ClientRequest) -> None:
        await request.respond(200, self.metrics.page(), (b"content-type", CONTENT_TYPE_LATEST.encode()))

    async def _list_models(self, request: ClientRequest) -> None:
        self._keys.tenant(request.header(b"authorization"))
        page = pages.ModelList(list(pages.list_models(self.fleet)))
        await request.respond(200, msgspec.json.encode(page), JSON_TYPE)

    async def _show_model(self, request: ClientRequest) -> None:
        self._keys.tenant(request.header(b"authorization"))
        name = request.path[len(_MODELS) :]
        model = next((model for model in pages.list_models(self.fleet) if model.id == name), None)
        if model is None:
            raise errors.model_not_found(name)
        await request.respond(200, msgspec.json.encode(model), JSON_TYPE)

    async def _show_response(self, request: ClientRequest) -> None:
        tenant = self._keys.tenant(request.header(b"authorization"))
        response_id = request.path[len(_RESPONSES) :]
        found = self.responses.find(response_id, tenant)
        if found is None:
            raise responses.not_found(response_id)
        await request.respond(200, found.page, JSON_TYPE)

    async def _delete_response(self, request: ClientRequest) -> None:
        tenant = self._keys.tenant(request.header(b"authorization"))
        response_id = request.path[len(_RESPONSES) :]
        if not self.responses.delete(response_id, tenant):
            raise responses.not_found(response_id)
        await request.respond(200, msgspec.json.encode(responses.Deleted(response_id)), JSON_TYPE)

    async def _tokenize(self, request: ClientRequest) -> None:
        tenant = self._keys.tenant(request.header(b"authorization"))
        raw = await request.body(self.options.max_body_bytes, self.options.body_timeout_s)
        asked = token_pages.read_tokenize(raw)
        target = self._finder.known_target(asked.model, cache_salt(tenant))
        page = await token_pages.tokenize(asked, target, self.text, len(raw))
        await request.respond(200, msgspec.json.encode(page), JSON_TYPE)

    async def _count_tokens(self, request: ClientRequest) -> None:
        tenant = self._keys.tenant(request.header(b"authorization"))
        raw = await request.body(self.options.max_body_bytes, self.options.body_timeout_s)
        body = schema.decode(raw, messages_body.CountBody)
        target = self._finder.known_target(body.model, cache_salt(tenant))
        messages_body.check_prompt(body)
        page = await messages.count_tokens(body, self.dialects.of(target.model), target, self.text, len(raw))
        ignored = messages.ignored_by(raw, body, target)
        headers = (ignored_header(ignored),) if ignored else ()
        await request.respond(200, msgspec.json.encode(page), JSON_TYPE, *headers)

    async def _detokenize(self, request: ClientRequest) -> None:
        self._keys.tenant(request.header(b"authorization"))
        raw = await request.body(self.options.max_body_bytes, self.options.body_timeout_s)
        name, ids = token_pages.read_detokenize(raw)
        page = await token_pages.detokenize(ids, self._finder.known_target(name, b"").model, self.text)
        await request.respond(200, msgspec.json.encode(page), JSON_TYPE)

    async def _openapi(self, request: ClientRequest) -> None:
        await request.respond(200, openapi.encoded(), JSON_TYPE)

    async def _docs(self, request: ClientRequest) -> None:
        await request.respond(200, openapi_page.page(), *openapi_page.HEADERS)

    async def _index(self, request: ClientRequest) -> None:
        self._keys.tenant(request.header(b"authorization"))
        await request.respond(200, msgspec.json.encode(index_page.overview(self.fleet.mirror)), JSON_TYPE)

    async def _index_of_worker(self, request: ClientRequest) -> None:
        self._keys.tenant(request.header(b"authorization"))
        worker_id = request.path[len(index_page.PATH) + 1 :]
        page = await index_page.of_worker(self.fleet.mirror, worker_id)
        await request.respond(200, msgspec.json.encode(page), JSON_TYPE)

    async def _explain(self, request: ClientRequest) -> None:
        tenant = self._keys.tenant(request.header(b"authorization"))
        request_id = request.path[len(explain_page.PATH) :]
        body, headers = explain_page.answer(self.explain, request_id, tenant, request.header(b"accept"))
        await request.respond(200, body, *headers)

    # -- generation

    async def _chat(self, request: ClientRequest) -> None:
        await self.generation.generate(request, "chat", self._fronts.chat)

    async def _messages(self, request: ClientRequest) -> None:
        await self.generation.generate(request, "messages", self._fronts.message)

    async def _responses(self, request: ClientRequest) -> None:
        await self.generation.generate(request, "responses", self._fronts.response)

    async def _completions(self, request: ClientRequest) -> None:
        await self.generation.generate(request, "completions", self._fronts.completion)


def _take_key(head: ClientHead) -> None:
    """Anthropic's clients say their key as x-api-key."""
    key = head.headers.get(b"x-api-key")
    if key is not None:
        head.headers.setdefault(b"authorization", b"Bearer " + key)
