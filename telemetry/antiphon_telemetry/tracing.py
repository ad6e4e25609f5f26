"""Traces, by OpenTelemetry, configured by its standard `OTEL_*` environment variables and off unless they ask for them.

Owned by the process's entry point: `configure` at the start, `shutdown` before `exit.leave` (which runs no exit
handlers). Everything else asks for `tracer(name)`, which may happen before `configure`.

Tracing is on when `OTEL_TRACES_EXPORTER` names an exporter (`otlp`, `console`), or when it is unset and
`OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` is set. While it is off, only the API package is
loaded, spans are no-ops, and a caller's `traceparent` still travels through. Export runs in a thread of the SDK: a slow
or absent collector costs spans, never requests.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("antiphon.tracing")

_PROPAGATOR = TraceContextTextMapPropagator()


class TracingError(ValueError):
    """An `OTEL_*` variable has a value that this program cannot follow."""


class _Process:
    """The tracer provider of this process: None while tracing is off."""

    provider: TracerProvider | None = None


def wanted(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the exporters that `environment` asks for; empty: tracing is off."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    named = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    if named:
        exporters = [name.strip().lower() for name in named.split(",") if name.strip()]
        unknown = sorted(set(exporters) - {"otlp", "console", "none"})
        if unknown:
            raise TracingError(f"OTEL_TRACES_EXPORTER={named!r}: {unknown[0]!r} is not one of otlp, console, none")
        return tuple(name for name in exporters if name != "none")
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return ("otlp",) if any(environment.get(name) for name in endpoints) else ()


def configure(service: str) -> bool:
    """Start exporting spans if the environment asks for it; says whether it does. Raises TracingError.

    `service` is the service name unless OTEL_SERVICE_NAME says another.
    """
    exporters = wanted(os.environ)
    if not exporters or _Process.provider is not None:
        return bool(exporters)

    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME") or service})
    # The process leaves by os._exit: `shutdown` flushes, an exit handler never would.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for name in exporters:
        provider.add_span_processor(BatchSpanProcessor(_exporter(name)))
    trace.set_tracer_provider(provider)
    _Process.provider = provider
    log.info("traces are exported by %s", ", ".join(exporters))
    return True


def _exporter(name: str) -> SpanExporter:
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    protocol = (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    raise TracingError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r}: use grpc or http/protobuf")


def tracer(name: str) -> trace.Tracer:
    """The tracer of one part of the program; records once `configure` has turned tracing on."""
    return trace.get_tracer(name)


def inject(span: trace.Span) -> str:
    """The W3C traceparent that makes `span` the parent of what another process does; empty: not traced."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def extract(traceparent: str) -> Context:
    """The context whose current span is the one that `traceparent` names; with no span if it is empty or malformed."""
    return _PROPAGATOR.extract({"traceparent": traceparent} if traceparent else {}, Context())


def shutdown(deadline_s: float = 3.0) -> bool:
    """Export what is still held and stop. False when that did not end in time (spans may be lost).

    Blocks: not for an event loop that still serves.
    """
    provider = _Process.provider
    if provider is None:
        return True
    _Process.provider = None
    # The SDK's own shutdown waits as long as its exporters retry; a thread of ours bounds it.
    flusher = threading.Thread(target=provider.shutdown, name="antiphon-trace-flush", daemon=True)
    flusher.start()
    flusher.join(deadline_s)
    if flusher.is_alive():
        log.warning("the trace collector did not take the last spans within %.1f s; they are lost", deadline_s)
        return False
    return True
