"""The life of one generating request: counted, traced, read, queued, answered, accounted for.

The handler of a request owns its flight, and withdraws it in a `finally`: whatever way a request ends, nothing of it
stays in the queue, on a worker, or in a gauge.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass

from antiphon_proto import worker_pb2 as pb
from antiphon_telemetry import tracing
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from antiphon_gateway import errors
from antiphon_gateway.auth import ApiKeys, cache_salt
from antiphon_gateway.calls import Call, Starter
from antiphon_gateway.client_request import ClientRequest
from antiphon_gateway.dispatch import Dispatcher
from antiphon_gateway.errors import ApiError
from antiphon_gateway.explain import Trail
from antiphon_gateway.explain_span import request_attributes
from antiphon_gateway.explain_store import ExplainStore
from antiphon_gateway.flight import Flight, StartAgain, Ticket
from antiphon_gateway.http import ClientGone
from antiphon_gateway.keep_alive import KeepAlive
from antiphon_gateway.metrics import GatewayMetrics
from antiphon_gateway.options import GatewayOptions
from antiphon_gateway.parameters import ignored_header
from antiphon_gateway.scaling_demand import Demand
from antiphon_gateway.streaming import Presence, send_stream, send_whole
from antiphon_gateway.wishes import read_wishes

log = logging.getLogger("antiphon.gateway")

_NO_PARENT = Context()

_MAX_STARTS = 8
"""A request is started again only where it can be served elsewhere; this bounds what nobody thought of."""


class Generation:
    """All requests that are being answered."""

    def __init__(
        self,
        options: GatewayOptions,
        keys: ApiKeys,
        gateway_id: str,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        explain: ExplainStore,
        demand: Demand,
        keep_alive: KeepAlive,
    ) -> None:
        self.draining = False
        """New ones are refused."""
        self.flights: dict[Flight, ClientRequest] = {}
        self.tracer = tracing.tracer("antiphon.gateway")
        self._options = options
        self._keys = keys
        self._gateway_id = gateway_id
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._explain = explain
        self._demand = demand
        self._keep_alive = keep_alive
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Requests that have not been answered to the end."""
        return self._in_flight

    async def drained(self) -> None:
        """Return when none is left. The caller bounds the wait."""
        await self._idle.wait()

    def end_all(self) -> None:
        """End every one with an error that its client sees."""
        for flight in self.flights:
            flight.end(errors.draining())

    def sweep(self) -> None:
        """Bound what cannot be bounded by an await of its own: silent requests and clients that take no data."""
        now = time.monotonic()
        self._keep_alive.sweep(now)
        for flight, request in list(self.flights.items()):
            self._dispatcher.sweep(flight, now)
            if not flight.sent_whole:
                self._keep_alive.look(request, now, flight.began_at, begun=flight.direct is not None)
            if flight.writing_since and now - flight.writing_since > self._options.client_timeout_s:
                log.warning("request %s: the client takes no data; disconnected", request.request_id)
                self._metrics.slow_client()
                request.abort()

    async def generate(self, request: ClientRequest, endpoint: str, start: Starter) -> None:
        """Count, trace and serve one generating request, whatever way it ends."""
        given = request.headers.get(b"traceparent")
        parent = _NO_PARENT if given is None else tracing.extract(given.decode("latin-1"))
        span = self.tracer.start_span(request.operation, context=parent, kind=SpanKind.SERVER)
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
            self._metrics.cancelled(outcome.model, endpoint)
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
                self._metrics.answered(outcome.model, endpoint, outcome.status)
            span.set_attribute("http.response.status_code", outcome.status)
            span.end()
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _serve(self, request: ClientRequest, start: Starter, span: Span, outcome: _Outcome) -> None:
        if self.draining:
            raise errors.draining()
        tenant, most = self._keys.caller(request.header(b"authorization"))
        wishes = read_wishes(request.header, most)
        raw = await request.body(self._options.max_body_bytes, self._options.body_timeout_s)
        traceparent = tracing.inject(span) if span.get_span_context().is_valid else ""
        ticket = Ticket(new_id(), tenant, cache_salt(tenant), traceparent, span, time.monotonic(), wishes)
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

    async def _fly(self, request: ClientRequest, call: Call, start: Starter, outcome: _Outcome) -> None:
        """One start of the request, to its end. Raises StartAgain where nothing was sent and others can serve it."""
        started = await start(call)
        flight, span = started.flight, call.ticket.span
        outcome.model = flight.model.name
        call.trail.queued(flight.target.name)
        self._explain.keep(call.trail)
        call.presence.follow(flight)
        if call.ignored and call.starts == 1:
            request.standing_headers += (ignored_header(call.ignored),)
        self.flights[flight] = request
        first = flight.choices[0]
        generates = first.sampling.max_tokens > 0 or first.prompt_logprobs is not None
        try:
            if generates:
                if call.starts == 1:
                    self._demand.arrived(flight)
                self._dispatcher.enqueue(flight)
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
            self._dispatcher.withdraw(flight)
            del self.flights[flight]
            if generates:
                self._demand.ended(flight)
            if not isinstance(flight.failure, StartAgain):
                _account(flight, span)
            # Flight and choices know each other: a long stream's would wait for the collector's rarest round.
            flight.choices = []


def new_id() -> str:
    """Of a request; unique in the cluster."""
    return os.urandom(16).hex()


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
    flight.metrics.prompt_tokens.inc(flight.served_prompt_tokens)
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
