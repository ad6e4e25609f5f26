"""A trace collector for tests: OTLP over HTTP, on a real socket."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class TraceCollector:
    """Keeps what is exported to `endpoint` (the value for OTEL_EXPORTER_OTLP_ENDPOINT)."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._requests: list[ExportTraceServiceRequest] = []
        self._arrived = threading.Condition(threading.RLock())

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self._arrived:
            self._requests.append(request)
            self._arrived.notify_all()

    def spans(self) -> list[tuple[str, Span]]:
        """(service name, span) of everything that has arrived."""
        with self._arrived:
            requests = list(self._requests)
        return [
            (next(a.value.string_value for a in batch.resource.attributes if a.key == "service.name"), span)
            for request in requests
            for batch in request.resource_spans
            for scope in batch.scope_spans
            for span in scope.spans
        ]

    def wait_for(self, names: set[str], deadline_s: float = 60.0) -> list[tuple[str, Span]]:
        """The spans, once there is one of each name. Raises AssertionError if that does not come about."""
        with self._arrived:
            complete = self._arrived.wait_for(
                lambda: names <= {span.name for _, span in self.spans()}, timeout=deadline_s
            )
        assert complete, f"wanted {names}, got {[span.name for _, span in self.spans()]}"
        return self.spans()


@contextmanager
def trace_collector() -> Iterator[TraceCollector]:
    """A collector that listens on a free port of the loopback address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = TraceCollector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
