"""Bodies and parameters that cannot be honoured, one by one, against one gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.fake_worker import FakeWorker
from tests.support.gateway import RunningGateway, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
COMPLETION: dict[str, Any] = {"model": "test-model", "prompt": "hello", "max_tokens": 4}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> FakeWorker:
    return FakeWorker()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(worker: FakeWorker) -> AsyncIterator[RunningGateway]:
    async with running_gateway(worker) as gateway:
        yield gateway


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"model": "\xff"}',
        b'{"model": "test-model", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"temperature": NaN}',
        b'{"messages":' * 100_000,
        b"[]",
        b'"text"',
    ],
)
async def test_bodies_that_are_not_json_objects_are_400(running: RunningGateway, raw: bytes) -> None:
    response = await running.client.post("/v1/chat/completions", content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert (await running.client.post("/v1/chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 10**400}, "n"),
        ({"seed": -(10**400)}, "seed"),
        ({"n": "2"}, "n"),
        ({"n": True}, "n"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x" * 2000]}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"259": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_chat_parameters_that_cannot_be_honoured_are_named(
    running: RunningGateway, worker: FakeWorker, changes: dict[str, Any], param: str
) -> None:
    before = len(worker.submits)
    response = await running.client.post("/v1/chat/completions", json={**CHAT, **changes})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert len(worker.submits) == before
    assert running.at_rest


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 10**6]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["x"] * 257}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
async def test_completion_parameters_that_cannot_be_honoured_are_named(
    running: RunningGateway, worker: FakeWorker, changes: dict[str, Any], param: str
) -> None:
    response = await running.client.post("/v1/completions", json={**COMPLETION, **changes})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("given", ["abc-1.2_3:4", "x" * 128])
async def test_a_request_id_is_echoed(running: RunningGateway, given: str) -> None:
    response = await running.client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "<script>"])
async def test_a_request_id_that_is_not_safe_is_replaced(running: RunningGateway, given: str) -> None:
    response = await running.client.get("/nothing", headers={"x-request-id": given})
    assert response.headers["x-request-id"].startswith("req-")
