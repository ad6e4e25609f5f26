"""Traces: off and free unless the OTEL variables ask for them; then they reach a collector, across processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from antiphon_telemetry import tracing
from opentelemetry import trace

from tests.support.telemetry import trace_collector

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

EXPORT = f"""
import sys
from antiphon_telemetry import tracing
tracer = tracing.tracer("antiphon.test")     # as modules do: before configure
assert tracing.configure("antiphon-worker")
with tracer.start_as_current_span("prefill", context=tracing.extract("{PARENT}")) as span:
    print(tracing.inject(span))
assert tracing.shutdown()
"""


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")} | variables
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_spans_reach_a_collector_and_continue_the_callers_trace() -> None:
    with trace_collector() as collector:
        done = run_python(EXPORT, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint)
        assert done.returncode == 0, done.stderr
        ((service, span),) = collector.wait_for({"prefill"})
    assert service == "antiphon-worker"
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert span.parent_span_id.hex() == "b7ad6b7169203331"
    assert done.stdout.strip() == f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"


def test_the_standard_service_name_wins() -> None:
    with trace_collector() as collector:
        done = run_python(EXPORT, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint, OTEL_SERVICE_NAME="mine")
        assert done.returncode == 0, done.stderr
        assert [service for service, _ in collector.wait_for({"prefill"})] == ["mine"]


def test_the_console_exporter() -> None:
    done = run_python(EXPORT, OTEL_TRACES_EXPORTER="console")
    assert done.returncode == 0, done.stderr
    assert '"name": "prefill"' in done.stdout


def test_off_by_default_without_the_sdk_and_the_callers_trace_goes_through() -> None:
    code = f"""
import sys
from antiphon_telemetry import tracing
assert not tracing.configure("antiphon-worker")
span = tracing.tracer("antiphon.test").start_span("x", context=tracing.extract("{PARENT}"))
assert not span.is_recording()
print(tracing.inject(span))
assert tracing.shutdown()
assert not [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == PARENT


def test_a_collector_that_does_not_answer_does_not_hold_the_end_of_a_process() -> None:
    """The listener accepts and says nothing: the exporter would wait and retry for long."""
    code = """
import socket, os
from antiphon_telemetry import tracing
silent = socket.create_server(("127.0.0.1", 0))
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
tracing.configure("antiphon-worker")
tracing.tracer("antiphon.test").start_span("x").end()
assert tracing.shutdown(deadline_s=0.2) is False
os._exit(0)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_an_untraced_span_has_no_traceparent() -> None:
    assert tracing.inject(trace.INVALID_SPAN) == ""


@pytest.mark.parametrize("malformed", ["", "nonsense", "00-0-0-00", PARENT + "-x\r\ny"])
def test_a_malformed_traceparent_is_no_parent(malformed: str) -> None:
    assert not trace.get_current_span(tracing.extract(malformed)).get_span_context().is_valid


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ()),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ("otlp",)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, ("otlp",)),
        ({"OTEL_TRACES_EXPORTER": "otlp,console"}, ("otlp", "console")),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ()),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ()),
        ({"OTEL_SERVICE_NAME": "x"}, ()),
    ],
)
def test_what_turns_tracing_on(environment: dict[str, str], expected: tuple[str, ...]) -> None:
    assert tracing.wanted(environment) == expected


def test_an_unknown_exporter_or_protocol_is_told() -> None:
    with pytest.raises(tracing.TracingError, match="'zipkin' is not one of otlp, console, none"):
        tracing.wanted({"OTEL_TRACES_EXPORTER": "zipkin"})
    done = run_python(EXPORT, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1", OTEL_EXPORTER_OTLP_PROTOCOL="http/json")
    assert "OTEL_EXPORTER_OTLP_PROTOCOL='http/json': use grpc or http/protobuf" in done.stderr
