"""The gateway as an application: paths, who may ask, and the life of one request.

Written by hand, as what a framework adds per request and per chunk is more than all that is done here. The handler of
a request owns its flight, and withdraws it in a `finally`: whatever way a request ends, nothing of it stays in the
queue, on a worker, or in a gauge.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from antiphon_kvtransfer import RedisAccess
from antiphon_proto import worker_pb2 as pb
from antiphon_telemetry import tracing
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from prometheus_client import CONTENT_TYPE_LATEST

from antiphon_gateway import (
    chat,
    completions,
    errors,
    explain_page,
    index_page,
    messages,
    messages_body,
    messages_prompt,
    openapi,
    openapi_page,
    pages,
    responses,
    responses_body,
    responses_prompt,
    schema,
    structured,
    token_pages,
)
from antiphon_gateway.answers import Renderer
from antiphon_gateway.auth import ApiKeys, cache_salt
from antiphon_gateway.chat_parsed import ParsedChatRenderer
from antiphon_gateway.cors import CrossOrigin
from antiphon_gateway.dispatch import Dispatcher, no_worker
from antiphon_gateway.error_forms import MESSAGES_PATH, error_event
from antiphon_gateway.errors import ApiError
from antiphon_gateway.explain import Trail
from antiphon_gateway.explain_span import request_attributes
from antiphon_gateway.explain_store import ExplainStore
from antiphon_gateway.fleet import Fleet
from antiphon_gateway.flight import Flight, StartAgain, Target, Ticket
from antiphon_gateway.grammar_checks import GrammarChecks
from antiphon_gateway.groups import Group
from antiphon_gateway.http import JSON_TYPE, ClientGone, Request
from antiphon_gateway.metrics import GatewayMetrics
from antiphon_gateway.models import ModelRegistry, Prompt
from antiphon_gateway.options import GatewayOptions
from antiphon_gateway.parameters import ignored_header, unknown_fields
from antiphon_gateway.responses_store import ResponseStore
from antiphon_gateway.scaling_demand import Demand
from antiphon_gateway.scaling_news import NewsDesk
from antiphon_gateway.scaling_writer import ScalingWriter
from antiphon_gateway.streaming import Presence, send_stream, send_whole
from antiphon_gateway.tokenization import TextWorkers
from antiphon_gateway.tokenization_cache import EncodingCache
from antiphon_gateway.tools import Dialects, Parsing, check_tool_choice, check_tools, forced_grammar, parsing_for
from antiphon_gateway.wishes import read_wishes

log = logging.getLogger("antiphon.gateway")

Handler: TypeAlias = Callable[[Request], Awaitable[None]]

_REQUEST_ID = re.compile(r"^[A-Za-z0-9._:\-]{1,128}$")
_MODELS = "/v1/models/"
_RESPONSES = f"{responses.PATH}/"
_SWEEP_S = 1.0
_NO_PARENT = Context()
_BYTES_PER_TOKEN = 4
"""Of a body, about, where there is nobody yet to tokenise it."""

_MAX_STARTS = 8
"""A request is started again only where it can be served elsewhere; this bounds what nobody thought of."""


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
        self.draining = False
        self._ending = False
        """Draining took too long: nobody waits any more."""
        self._gateway_id = gateway_id
        self._keys = keys
        self._cross_origin = CrossOrigin(options.cors_origin) if options.cors_origin else None
        self._text = TextWorkers()
        self.grammar_checks = GrammarChecks()
        self._tracer = tracing.tracer("antiphon.gateway")
        self._flights: dict[Flight, Request] = {}
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._sweeper: asyncio.Task[None] | None = None
        self.demand = Demand()
        self._scaling: ScalingWriter | None = None
        self._scaling_task: asyncio.Task[None] | None = None
        desk = NewsDesk(gateway_id, self.fleet, self.dispatcher, self.demand, lambda: self._flights)
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
            in_flight=lambda: self._in_flight,
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
        self._text.close()
        self.grammar_checks.close()

    @property
    def paths(self) -> tuple[str, ...]:
        """Those that are there as they are; below some of them there are more."""
        return tuple(self._routes)

    @property
    def in_flight(self) -> int:
        """Generating requests that have not been answered to the end."""
        return self._in_flight

    async def drained(self) -> None:
        """Return when no generating request is left. The caller bounds the wait."""
        await self._idle.wait()

    def end_all(self) -> None:
        """End every running request with an error that its client sees."""
        self._ending = True
        self.dispatcher.lobby.call_all()
        for flight in self._flights:
            flight.end(errors.draining())

    async def _sweep(self) -> None:
        """Bound what cannot be bounded by an await of its own: silent requests and clients that take no data."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            self.responses.expire()
            for flight, request in list(self._flights.items()):
                self.dispatcher.sweep(flight, now)
                if flight.writing_since and now - flight.writing_since > self.options.client_timeout_s:
                    log.warning("request %s: the client takes no data; disconnected", request.request_id)
                    self.metrics.slow_client()
                    request.abort()

    # -- requests

    async def handle(self, request: Request) -> None:
        """Answer it. What goes wrong is answered or logged; nothing is raised but where the answer cannot be sent."""
        given = request.header(b"x-request-id")
        request.request_id = given if given and _REQUEST_ID.match(given) else f"req-{_new_id()}"
        key = request.headers.get(b"x-api-key")
        if key is not None:
            # Anthropic's clients say their key so.
            request.headers.setdefault(b"authorization", b"Bearer " + key)
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

    async def _fail(self, request: Request, error: ApiError) -> None:
        if request.started:
            await request.send(error_event(error, request.path, request.request_id), last=True)
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

    def _handler(self, request: Request) -> Handler:
        methods = self._methods(request.path)
        handler = methods.get(request.method)
        if handler is not None:
            return handler
        if not methods:
            raise errors.unknown_url(request.method, request.path)
        raise errors.method_not_allowed(request.method, request.path, ", ".join(methods))

    # -- small pages

    async def _health(self, request: Request) -> None:
        await request.respond(200, b'{"status":"ok"}', JSON_TYPE)

    async def _ready(self, request: Request) -> None:
        page = pages.ready_page(
            self.fleet,
            self.dispatcher.selection,
            draining=self.draining,
            ready_without_workers=self.options.ready_without_workers,
        )
        await request.respond(200 if page.ready else 503, msgspec.json.encode(page), JSON_TYPE)

    async def _metrics(self, request: Request) -> None:
        await request.respond(200, self.metrics.page(), (b"content-type", CONTENT_TYPE_LATEST.encode()))

    async def _list_models(self, request: Request) -> None:
        self._keys.tenant(request.header(b"authorization"))
        page = pages.ModelList(list(pages.list_models(self.fleet)))
        await request.respond(200, msgspec.json.encode(page), JSON_TYPE)

    async def _show_model(self, request: Request) -> None:
        self._keys.tenant(request.header(b"authorization"))
        name = request.path[len(_MODELS) :]
        model = next((model for model in pages.list_models(self.fleet) if model.id == name), None)
        if model is None:
            raise errors.model_not_found(name)
        await request.respond(200, msgspec.json.encode(model), JSON_TYPE)

    async def _show_response(self, request: Request) -> None:
        tenant = self._keys.tenant(request.header(b"authorization"))
        response_id = request.path[len(_RESPONSES) :]
        found = self.responses.find(response_id, tenant)
        if found is None:
            raise responses.not_found(response_id)
        await request.respond(200, found.page, JSON_TYPE)

    async def _delete_response(self, request: Request) -> None:
        tenant = self._keys.tenant(request.header(b"authorization"))
        response_id = request.path[len(_RESPONSES) :]
        if not self.responses.delete(response_id, tenant):
            raise responses.not_found(response_id)
        await request.respond(200, msgspec.json.encode(responses.Deleted(response_id)), JSON_TYPE)

    async def _tokenize(self, request: Request) -> None:
        tenant = self._keys.tenant(request.header(b"authorization"))
        raw = await request.body(self.options.max_body_bytes, self.options.body_timeout_s)
        asked = token_pages.read_tokenize(raw)
        target = self._known_target(asked.model, cache_salt(tenant))
        page = await token_pages.tokenize(asked, target, self._text, len(raw))
        await request.respond(200, msgspec.json.encode(page), JSON_TYPE)

    async def _count_tokens(self, request: Request) -> None:
        tenant = self._keys.tenant(request.header(b"authorization"))
        raw = await request.body(self.options.max_body_bytes, self.options.body_timeout_s)
        body = schema.decode(raw, messages_body.CountBody)
        target = self._known_target(body.model, cache_salt(tenant))
        messages_body.check_prompt(body)
        page = await messages.count_tokens(body, self.dialects.of(target.model), target, self._text, len(raw))
        ignored = messages.ignored_by(raw, body, target)
        headers = (ignored_header(ignored),) if ignored else ()
        await request.respond(200, msgspec.json.encode(page), JSON_TYPE, *headers)

    async def _detokenize(self, request: Request) -> None:
        self._keys.tenant(request.header(b"authorization"))
        raw = await request.body(self.options.max_body_bytes, self.options.body_timeout_s)
        name, ids = token_pages.read_detokenize(raw)
        page = await token_pages.detokenize(ids, self._known_target(name, b"").model, self._text)
        await request.respond(200, msgspec.json.encode(page), JSON_TYPE)

    async def _openapi(self, request: Request) -> None:
        await request.respond(200, openapi.encoded(), JSON_TYPE)

    async def _docs(self, request: Request) -> None:
        await request.respond(200, openapi_page.page(), *openapi_page.HEADERS)

    async def _index(self, request: Request) -> None:
        self._keys.tenant(request.header(b"authorization"))
        await request.respond(200, msgspec.json.encode(index_page.overview(self.fleet.mirror)), JSON_TYPE)

    async def _index_of_worker(self, request: Request) -> None:
        self._keys.tenant(request.header(b"authorization"))
        worker_id = request.path[len(index_page.PATH) + 1 :]
        page = await index_page.of_worker(self.fleet.mirror, worker_id)
        await request.respond(200, msgspec.json.encode(page), JSON_TYPE)

    async def _explain(self, request: Request) -> None:
        tenant = self._keys.tenant(request.header(b"authorization"))
        request_id = request.path[len(explain_page.PATH) :]
        body, headers = explain_page.answer(self.explain, request_id, tenant, request.header(b"accept"))
        await request.respond(200, body, *headers)

    # -- generation

    async def _chat(self, request: Request) -> None:
        await self._generate(request, "chat", self._start_chat)

    async def _messages(self, request: Request) -> None:
        await self._generate(request, "messages", self._start_message)

    async def _responses(self, request: Request) -> None:
        await self._generate(request, "responses", self._start_response)

    async def _completions(self, request: Request) -> None:
        await self._generate(request, "completions", self._start_completion)

    async def _start_chat(self, call: Call) -> Started:
        body = schema.decode(call.raw, schema.ChatBody)
        target = await self._target(body.model, call)
        if body.wide or body.reasoning_effort is not None:
            call.ignored = chat.ignored_by(call.raw, body, target)
        if body.tools and chat.has_no_place_for_tools(body, target):
            body.tools = None
            call.ignored += ("tools",)
        plan = await self._plan_chat(body, target, len(call.raw))
        answer_id = f"chatcmpl-{call.ticket.request_id}"
        renderer: Renderer
        if plan.parsing is None:
            renderer = chat.ChatRenderer(answer_id, body, target)
        else:
            renderer = ParsedChatRenderer(answer_id, body, target, plan.parsing)
        flight = self._flight(call, target, [plan.prompt], plan.sampling, body, "chat")
        flight.enough = plan.enough
        return Started(flight, renderer, bool(body.stream))

    async def _start_message(self, call: Call) -> Started:
        body = schema.decode(call.raw, messages_body.MessageBody)
        target = await self._target(body.model, call)
        call.ignored = messages.ignored_by(call.raw, body, target)
        messages_body.check_message(body)
        messages.check_model(body, self.dialects.of(target.model), target)
        asked = messages_prompt.to_chat(body)
        plan = await self._plan_chat(asked, target, len(call.raw))
        messages.complete_sampling(plan.sampling, body)
        renderer = messages.MessageRenderer(
            f"msg_{call.ticket.request_id}", body, target, plan.parsing, plan.sampling.max_tokens
        )
        flight = self._flight(call, target, [plan.prompt], plan.sampling, asked, "messages")
        flight.enough = plan.enough
        return Started(flight, renderer, bool(body.stream))

    async def _start_response(self, call: Call) -> Started:
        body = schema.decode(call.raw, responses_body.ResponseBody)
        target = await self._target(body.model, call)
        try:
            call.ignored = responses.ignored_by(call.raw, body, target)
            exchange = responses.Exchange(body, call.ticket, self.responses)
            plan = await self._plan_chat(exchange.chat, target, len(call.raw) + exchange.earlier_bytes)
        except ApiError as error:
            raise responses_prompt.in_own_words(error) from error
        responses.complete_sampling(plan.sampling, body)
        flight = self._flight(call, target, [plan.prompt], plan.sampling, exchange.chat, "responses")
        flight.enough = plan.enough
        return Started(flight, responses.ResponseRenderer(exchange, plan.parsing), bool(body.stream))

    async def _plan_chat(self, body: schema.ChatBody, target: Target, body_bytes: int) -> ChatPlan:
        """Raises ApiError (400)."""
        schema.check_chat(body)
        if body.tools or body.tool_choice is not None:
            check_tools(body.tools or ())
            check_tool_choice(body)
        grammar = await self._grammar(body, target)
        prompt = await chat.make_prompt(body, target, self._text, body_bytes)
        sampling = chat.sampling_for(body, target, prompt)
        parsing = parsing_for(body, target.model, prompt, self.dialects)
        if grammar is not None:
            structured.after_reasoning(grammar, parsing, target.model, prompt.token_ids)
            sampling.grammar.CopyFrom(grammar)
        elif body.tools:
            forced = forced_grammar(body, parsing)
            if forced is not None:
                await self.grammar_checks.check(forced, target.model, "tools")
                sampling.grammar.CopyFrom(forced)
        if parsing is not None:
            sampling.kept_special_ids.extend(parsing.kept_special_ids)
        return ChatPlan(prompt, sampling, parsing, parsing.enough() if parsing is not None else None)

    async def _start_completion(self, call: Call) -> Started:
        body = schema.decode(call.raw, schema.CompletionBody)
        target = await self._target(body.model, call)
        schema.check_completion(body)
        if body.wide:
            call.ignored = unknown_fields(call.raw, type(body))
        grammar = await self._grammar(body, target)
        prompts = await completions.make_prompts(body, target, self._text)
        sampling = completions.sampling_for(body, target, prompts)
        if grammar is not None:
            sampling.grammar.CopyFrom(grammar)
        flight = self._flight(call, target, prompts, sampling, body, "completions")
        renderer = completions.CompletionRenderer(f"cmpl-{call.ticket.request_id}", body, target)
        return Started(flight, renderer, bool(body.stream))

    async def _grammar(self, body: schema.CommonBody, target: Target) -> pb.Grammar | None:
        """What the answer has to keep to; it compiles. Raises ApiError (400)."""
        wanted = structured.wanted_by(body)
        if wanted is None:
            return None
        await self.grammar_checks.check(wanted.grammar, target.model, wanted.param)
        return wanted.grammar

    def _flight(
        self,
        call: Call,
        target: Target,
        prompts: list[Prompt],
        sampling: pb.Sampling,
        body: schema.CommonBody,
        endpoint: str,
    ) -> Flight:
        flight = Flight(
            call.ticket,
            target,
            prompts,
            sampling,
            choices_per_prompt=body.n or 1,
            buffer_steps=self.options.stream_buffer_steps,
            metrics=self.metrics.of(target.model.name, endpoint),
            sent_whole=not body.stream,
            failures=call.failures,
            trail=call.trail,
            priority=call.ticket.wishes.granted(body.service_tier, body.priority),
        )
        if call.woken_at:
            # Its waiting for a place begins now: it is not to be turned away for having waited for the first worker.
            flight.queued_at = call.woken_at
        return flight

    # -- from a name to workers

    async def _target(self, name: str, call: Call) -> Target:
        """What the client means. Waits where the Model is waking. Raises ApiError (404, 429, 503) and ClientGone."""
        catalogue = self.fleet.catalogue
        while True:
            key = self._key(name)
            record = catalogue.record(key)
            group = self.dispatcher.selection.choose(key)
            if group is None and record is not None and record.waking:
                await self._wait_for_worker(name, key, call)
                continue
            model = self.models.get(key) if group is None else self.models.by_digest(group.card_digest)
            if model is None:
                raise no_worker(name, record)
            return Target(
                name=name,
                # Without workers: whatever is wrong with the request itself is said first.
                group=group or Group(key, "", model.digest),
                model=model,
                max_context_tokens=pages.context_limit(model, record.max_context_tokens if record is not None else 0),
                salt=b"" if record is not None and record.isolation == "Shared" else call.ticket.salt,
            )

    def _known_target(self, name: str, salt: bytes) -> Target:
        """What the client means, whether or not anybody serves it now. Raises ApiError (404, 503)."""
        key = self._key(name)
        record, model = self.fleet.catalogue.record(key), self.models.get(key)
        if model is None:
            raise no_worker(name, record)
        limit = pages.context_limit(model, record.max_context_tokens if record is not None else 0)
        return Target(name, Group(key, "", model.digest), model, limit, salt)

    def _key(self, name: str) -> str:
        """The model that `name` means. Raises ApiError (404, 503)."""
        catalogue = self.fleet.catalogue
        key = catalogue.key_of(name)
        if key is not None:
            return key
        if catalogue.record(name) is None:
            if self.models.get(name) is not None:
                return name
            if name in self.fleet.announced_models():
                raise errors.no_worker(name, "none of its workers can be reached")
        raise errors.model_not_found(name)

    async def _wait_for_worker(self, name: str, key: str, call: Call) -> None:
        """Return when something has changed for the model. Raises ApiError (429, 503) and ClientGone."""
        if self._ending:
            raise errors.draining()
        lobby, options, record = self.dispatcher.lobby, self.options, self.fleet.catalogue.record(key)
        tokens = len(call.raw) // _BYTES_PER_TOKEN
        # One alone always may wait, however long it is.
        if self.dispatcher.waiting >= options.queue_size or (
            len(lobby) and lobby.tokens + tokens > options.queue_tokens
        ):
            retry_after_s = record.retry_after_s if record is not None else 1
            raise errors.too_many_held(name, options.queue_size, retry_after_s=retry_after_s)
        wait_s = min(options.wake_timeout_s, call.ticket.wishes.timeout_s or options.wake_timeout_s)
        remaining_s = call.ticket.arrived_at + wait_s - time.monotonic()
        with lobby.place(key, tokens) as changed:
            if remaining_s > 0 and await call.presence.until(changed, remaining_s):
                call.woken_at = time.monotonic()
                return
        raise no_worker(name, self.fleet.catalogue.record(key), waited_s=wait_s)

    async def _generate(self, request: Request, endpoint: str, start: Starter) -> None:
        """Count, trace and serve one generating request, whatever way it ends."""
        given = request.headers.get(b"traceparent")
        parent = _NO_PARENT if given is None else tracing.extract(given.decode("latin-1"))
        span = self._tracer.start_span(f"POST {request.path}", context=parent, kind=SpanKind.SERVER)
        self._in_flight += 1
        self._idle.clear()
        outcome = _Outcome()
        try:
            await self._serve(request, start, span, outcome)
            if outcome.status == 0:
                outcome.status = 200
        except ApiError as error:
            outcome.status, outcome.error = error.status, error.message
            span.set_status(Status(StatusCode.ERROR, error.message))
            raise
        except ClientGone:
            self.metrics.cancelled(outcome.model, endpoint)
            span.add_event("client gone")
            raise
        except Exception as error:
            outcome.status, outcome.error = 500, "a fault of this gateway; its log has it"
            span.record_exception(error)
            raise
        finally:
            if outcome.trail is not None:
                outcome.trail.end(outcome.status, outcome.error)
            if outcome.status:
                self.metrics.answered(outcome.model, endpoint, outcome.status)
            span.set_attribute("http.response.status_code", outcome.status)
            span.end()
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _serve(self, request: Request, start: Starter, span: Span, outcome: _Outcome) -> None:
        if self.draining:
            raise errors.draining()
        tenant, most = self._keys.caller(request.header(b"authorization"))
        wishes = read_wishes(request.header, most)
        raw = await request.body(self.options.max_body_bytes, self.options.body_timeout_s)
        traceparent = tracing.inject(span) if span.get_span_context().is_valid else ""
        ticket = Ticket(_new_id(), tenant, cache_salt(tenant), traceparent, span, time.monotonic(), wishes)
        if span.is_recording():
            span.set_attributes(
                {"antiphon.request_id": ticket.request_id, "antiphon.client_request_id": request.request_id}
            )
        outcome.trail = Trail(ticket, request.request_id, request.path, self._gateway_id)
        request.late_headers = outcome.trail.headers
        call = Call(raw, ticket, Presence(request), outcome.trail)
        while True:
            call.starts += 1
            try:
                await self._fly(request, call, start, outcome)
                return
            except StartAgain as again:
                if call.starts == _MAX_STARTS:
                    raise
                log.info("request %s starts again: its workers are gone", ticket.request_id)
                call.failures = again.failures

    async def _fly(self, request: Request, call: Call, start: Starter, outcome: _Outcome) -> None:
        """One start of the request, to its end. Raises StartAgain where nothing was sent and others can serve it."""
        started = await start(call)
        flight, span = started.flight, call.ticket.span
        outcome.model = flight.model.name
        call.trail.queued(flight.target.name)
        self.explain.keep(call.trail)
        call.presence.follow(flight)
        if call.ignored and call.starts == 1:
            request.standing_headers += (ignored_header(call.ignored),)
        self._flights[flight] = request
        generates = flight.choices[0].sampling.max_tokens > 0
        try:
            if generates:
                if call.starts == 1:
                    self.demand.arrived(flight)
                self.dispatcher.enqueue(flight)
            else:
                _complete(flight)
            if started.stream:
                failure = await send_stream(request, flight, started.renderer)
                if failure is not None:
                    log.warning("request %s (%s): %s", request.request_id, call.ticket.request_id, failure.message)
                    outcome.status, outcome.error = failure.status, failure.message
                    span.set_status(Status(StatusCode.ERROR, failure.message))
            else:
                await send_whole(request, flight, started.renderer)
        finally:
            self.dispatcher.withdraw(flight)
            del self._flights[flight]
            if generates:
                self.demand.ended(flight)
            if not isinstance(flight.failure, StartAgain):
                _account(flight, span)
            # Flight and choices know each other: a long stream's would wait for the collector's rarest round.
            flight.choices = []


def _new_id() -> str:
    return os.urandom(16).hex()


class Started(msgspec.Struct, frozen=True):
    """A request that has been read and understood, ready to be queued."""

    flight: Flight
    renderer: Renderer
    stream: bool


class ChatPlan(msgspec.Struct, frozen=True):
    """What a request for a chat's answer comes to: what workers are given, and how what they say is read."""

    prompt: Prompt
    sampling: pb.Sampling
    parsing: Parsing | None
    """None: the answer is text and nothing else."""
    enough: Callable[[int, str], bool] | None
    """As a flight has it."""


@dataclass(slots=True)
class Call:
    """One generating request until it is answered: all that starting it, or starting it again, needs."""

    raw: bytes
    ticket: Ticket
    presence: Presence
    trail: Trail
    starts: int = 0
    failures: int = 0
    """How often workers have failed on it."""
    woken_at: float = 0.0
    """Monotonic: when it had waited for a Model that woke; 0: it has not."""
    ignored: tuple[str, ...] = ()
    """Fields of the body that have no effect, of which the client is told."""


Starter: TypeAlias = Callable[[Call], Awaitable[Started]]


@dataclass(slots=True)
class _Outcome:
    """How a request ended, for the metrics. Status 0: with nobody to answer."""

    model: str = ""
    status: int = 0
    error: str = ""
    trail: Trail | None = None


def _complete(flight: Flight) -> None:
    """End every choice at once, with nothing generated."""
    for choice in flight.choices:
        choice.put(pb.RequestStep(finish=pb.FINISH_LENGTH))


def _account(flight: Flight, span: Span) -> None:
    flight.metrics.prompt_tokens.inc(flight.prompt_tokens)
    flight.metrics.completion_tokens.inc(flight.completion_tokens)
    flight.metrics.cached_tokens.inc(flight.cached_tokens)
    if span.is_recording():
        span.set_attributes(
            {
                "gen_ai.request.model": flight.target.name,
                "gen_ai.usage.input_tokens": flight.prompt_tokens,
                "gen_ai.usage.output_tokens": flight.completion_tokens,
                "antiphon.cached_tokens": flight.cached_tokens,
                "antiphon.choices": len(flight.choices),
            }
        )
        record = flight.trail.current()
        if record is not None:
            span.set_attributes(request_attributes(record))
