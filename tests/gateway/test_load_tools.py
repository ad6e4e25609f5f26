"""What public load tools send, and what they read: guidellm 0.8.1 and aiperf 0.13.0 (`benchmarks/load_tools`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from tests.support.fake_worker import FakeWorker
from tests.support.gateway import RunningGateway, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 5
PARTS = [{"type": "text", "text": "Question first can wait"}]
COUNTED = {"include_usage": True, "continuous_usage_stats": True}
GUIDELLM = {"model": "test-model", "stream": True, "stop": None, "ignore_eos": True}
AIPERF = {"model": "test-model", "stream": True}

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "guidellm chat": (
        "/v1/chat/completions",
        {
            **GUIDELLM,
            "messages": [{"role": "user", "content": PARTS}],
            "max_completion_tokens": TOKENS,
            "stream_options": COUNTED,
        },
    ),
    "guidellm completions": (
        "/v1/completions",
        {**GUIDELLM, "prompt": "Question first", "max_tokens": TOKENS, "stream_options": COUNTED},
    ),
    "guidellm responses": (
        "/v1/responses",
        {
            **GUIDELLM,
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Question first"}]}],
            "max_output_tokens": TOKENS,
        },
    ),
    "aiperf chat": (
        "/v1/chat/completions",
        {
            **AIPERF,
            "messages": [{"role": "user", "content": "I doubt not"}],
            "max_completion_tokens": TOKENS,
            "ignore_eos": True,
            "stream_options": COUNTED,
        },
    ),
    "aiperf completions": (
        "/v1/completions",
        {**AIPERF, "prompt": ["I doubt not"], "max_tokens": TOKENS, "stream_options": {"include_usage": True}},
    ),
    "aiperf messages": (
        "/v1/messages",
        {**AIPERF, "messages": [{"role": "user", "content": "I doubt not"}], "max_tokens": TOKENS},
    ),
    "aiperf responses": (
        "/v1/responses",
        {
            **AIPERF,
            "input": [{"type": "message", "role": "user", "content": "I doubt not"}],
            "max_output_tokens": TOKENS,
            "stream_options": {"include_usage": True},
        },
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[RunningGateway]:
    async with running_gateway(FakeWorker()) as gateway:
        yield gateway


@pytest.mark.parametrize("name", ASKED)
async def test_a_stream_ends_with_the_usage_that_the_tool_reads(running: RunningGateway, name: str) -> None:
    path, body = ASKED[name]
    response = await running.client.post(path, json=body)
    assert response.status_code == 200, response.text
    told = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    events: list[dict[str, Any]] = [msgspec.json.decode(line) for line in told]
    (tokens,) = [usage_of(event) for event in reversed(events) if usage_of(event)][:1]
    assert tokens == TOKENS


def usage_of(event: dict[str, Any]) -> int:
    """The answer's tokens, by any of the APIs; 0: the event does not tell."""
    usage = event.get("usage") or (event.get("response") or {}).get("usage") or {}
    return int(usage.get("completion_tokens") or usage.get("output_tokens") or 0)


async def test_what_they_look_at_before_they_begin(running: RunningGateway) -> None:
    assert (await running.client.get("/health")).status_code == 200
    models = (await running.client.get("/v1/models")).json()
    assert "test-model" in [model["id"] for model in models["data"]]
    assert "antiphon_gateway_time_to_first_token_seconds" in (await running.client.get("/metrics")).text
