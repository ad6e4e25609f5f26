"""One request is one trace through the processes of the house, and a client's own trace goes on in it."""

from __future__ import annotations

import httpx

from tests.support.serve import running_serve
from tests.support.telemetry import trace_collector

TRACE = "0af7651916cd43dd8448eb211c80319c"
BYTES_OF_PROMPT = 3000


def test_a_request_is_one_trace_through_gateway_decode_and_prefill() -> None:
    with trace_collector() as collector:
        # Prompts are expensive here, so that a worker of its own for them pays.
        options = ("--engine", "timed", "--kv-blocks", "256", "--timed-per-new-token-ms", "0.2")
        tracing = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        with running_serve(*options, **tracing) as base_url, httpx.Client(trust_env=False, timeout=60) as client:
            body = {"model": "timed", "prompt": "x" * BYTES_OF_PROMPT, "max_tokens": 3}
            headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
            answer = client.post(f"{base_url}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
        spans = collector.wait_for({"POST /v1/completions", "decode", "remote prefill", "prefill", "kv.pull"})
    assert {span.trace_id.hex() for _, span in spans} == {TRACE}
    assert {service for service, _ in spans} == {"antiphon-gateway", "antiphon-worker"}
    by_name = {span.name: span for _, span in spans}
    assert by_name["POST /v1/completions"].parent_span_id.hex() == "b7ad6b7169203331"
    assert by_name["decode"].parent_span_id == by_name["POST /v1/completions"].span_id
    assert by_name["prefill"].parent_span_id == by_name["remote prefill"].span_id
