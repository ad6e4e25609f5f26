"""The document of the API: complete, current with the code, and kept to by a real gateway, whatever it is sent."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import schemathesis
from antiphon_gateway import openapi
from antiphon_gateway.parameters import PARAMETERS, Endpoint
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.fake_worker import FakeWorker, byte_card
from tests.support.gateway import eventually, running_gateway

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EXAMPLES = 5


CHAT: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
COMPLETION: dict[str, Any] = {"model": "test-model", "prompt": ["hi", "ho"], "max_tokens": 3}
RESPONSE: dict[str, Any] = {"model": "test-model", "input": "hi", "max_output_tokens": 3}
TOOL = {"name": "look", "parameters": {"type": "object"}}
GOOD: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": (
        CHAT,
        {**CHAT, "stream": True, "stream_options": {"include_usage": True}},
        {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2},
        {**CHAT, "prompt_logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": True},
        {**CHAT, "tools": [{"type": "function", "function": TOOL}]},
    ),
    "/v1/completions": (
        COMPLETION,
        {**COMPLETION, "stream": True},
        {**COMPLETION, "logprobs": 1, "user": "u"},
        {**COMPLETION, "prompt_logprobs": 1, "echo": True, "logprobs": 2, "return_token_ids": True},
    ),
    "/v1/messages": (CHAT, {**CHAT, "stream": True}, {**CHAT, "tools": [{"name": "look", "input_schema": {}}]}),
    "/v1/responses": (RESPONSE, {**RESPONSE, "stream": True}),
    "/v1/messages/count_tokens": ({name: CHAT[name] for name in ("model", "messages")},),
    "/tokenize": ({"model": "test-model", "prompt": "hi", "return_token_strs": True},),
    "/detokenize": ({"model": "test-model", "tokens": [1, 2]},),
}
"""Bodies that are answered 200: of the drawn ones, most are refused."""
THERE = {"model": "test-model"}
"""Of what paths name, what is there; beside it the ids of answers that were given."""


def for_one_model(document: dict[str, Any]) -> dict[str, Any]:
    """The same, where the model is one that is there: else all of it would be answered 404."""
    for name, record in document["components"]["schemas"].items():
        if name.endswith("Body") and "model" in record["properties"]:
            record["properties"]["model"] = {"enum": ["test-model"]}
    return document


def send_what_the_document_allows(document: dict[str, Any], url: str) -> list[str]:
    """Examples of every operation; the names of those that were sent. Raises what a check finds."""
    sent: list[str] = []
    there = dict(THERE)
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        for body in GOOD.get(operation.path, ()):
            good = operation.Case(body=body, media_type="application/json")
            answer = good.call_and_validate(base_url=url, checks=CHECKS, timeout=20)
            assert answer.status_code == 200, answer.text
            if answer.headers["content-type"] == ["application/json"]:
                name = "response_id" if operation.path == "/v1/responses" else "request_id"
                there[name] = answer.json().get("id", there.get(name, ""))
        names = set(re.findall(r"{(\w+)}", operation.path))
        if names and names <= set(there):
            good = operation.Case(path_parameters={name: there[name] for name in names})
            assert good.call_and_validate(base_url=url, checks=CHECKS, timeout=20).status_code == 200, operation.path

        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def run(case: Any) -> None:
            case.call_and_validate(base_url=url, checks=CHECKS, timeout=20)

        run()
        sent.append(f"{operation.method.upper()} {operation.path}")
    return sent


async def test_a_gateway_keeps_to_the_document() -> None:
    async with running_gateway(FakeWorker(byte_card(context=500))) as running:
        document = for_one_model(openapi.document())
        sent = await asyncio.to_thread(send_what_the_document_allows, document, running.url)
        assert sent == [f"{operation.method} {operation.path}" for operation in openapi.OPERATIONS]
        await eventually(lambda: running.at_rest)


async def test_an_answer_that_the_document_does_not_allow_is_found() -> None:
    document = for_one_model(openapi.document())
    document["components"]["schemas"]["UsageBody"]["properties"]["total_tokens"] = {"type": "string"}
    async with running_gateway(FakeWorker()) as running:
        with pytest.raises(FailureGroup, match="schema"):
            await asyncio.to_thread(send_what_the_document_allows, document, running.url)


async def test_every_path_is_in_the_document() -> None:
    async with running_gateway() as running:
        assert set(running.gateway.paths) <= {operation.path for operation in openapi.OPERATIONS}, (
            "an endpoint needs a row in openapi.OPERATIONS"
        )
        response = await running.client.get("/openapi.json")
        assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
        assert response.json() == openapi.document()


async def test_the_page_names_every_path_and_parameter_and_loads_nothing() -> None:
    async with running_gateway() as running:
        response = await running.client.get("/docs")
        assert response.headers["content-type"].startswith("text/html")
        assert response.headers["content-security-policy"].startswith("default-src 'none'")
        for operation in openapi.OPERATIONS:
            assert f"{operation.method} {operation.path}</code>" in response.text
        for row in PARAMETERS:
            assert f"<code>{row.name}</code>" in response.text
        assert "<script" not in response.text
        assert "://" not in response.text


@pytest.mark.parametrize(
    ("endpoint", "record"), [(Endpoint.CHAT, "ChatBody"), (Endpoint.COMPLETIONS, "CompletionBody")]
)
def test_a_body_in_the_document_has_the_parameters_of_the_table(endpoint: Endpoint, record: str) -> None:
    properties = openapi.document()["components"]["schemas"][record]["properties"]
    assert set(properties) == {row.name for row in PARAMETERS if endpoint in row.endpoints}
    assert all(field["description"] for field in properties.values())
