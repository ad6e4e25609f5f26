"""Calls of tools that are forced, against a real worker process: its engine keeps to the grammar, token by token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.support.gateway import RunningGateway, eventually, running_gateway
from tests.support.workers import Workers

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Troms\u00f8"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": NOW}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    folder: Path = tmp_path_factory.mktemp("workers")
    async with Workers(folder) as started:
        worker = await started.start("--role", "both")
        async with running_gateway(worker=(worker.ready.address,)) as gateway:
            await eventually(lambda: len(gateway.gateway.fleet.workers()) == 1)
            yield gateway


def body(running: RunningGateway, **changes: Any) -> dict[str, Any]:
    (model,) = running.gateway.models
    messages = [{"role": "user", "content": "What will the weather be?"}]
    return {"model": model.name, "messages": messages, "tools": TOOLS, "max_tokens": 1000, **changes}


async def answer(running: RunningGateway, **changes: Any) -> dict[str, Any]:
    response = await running.client.post("/v1/chat/completions", json=body(running, **changes))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


def check_arguments(function: dict[str, str]) -> None:
    arguments = json.loads(function["arguments"])
    if function["name"] == "now":
        assert arguments == {}
        return
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in ("Oslo", "Troms\u00f8")
    assert 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("seed", range(4))
async def test_a_named_tool_is_called_once_whatever_the_model_wants(running: RunningGateway, seed: int) -> None:
    choice = await answer(running, tool_choice=NAMED, seed=seed)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    check_arguments(call["function"])
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "stop", "as OpenAI says it where the tool was named"


@pytest.mark.parametrize("seed", range(4))
async def test_some_tool_is_called_where_one_is_required(running: RunningGateway, seed: int) -> None:
    choice = await answer(running, tool_choice="required", seed=seed)
    assert choice["message"]["tool_calls"]
    for call in choice["message"]["tool_calls"]:
        check_arguments(call["function"])
    assert choice["finish_reason"] == "tool_calls"
    alone = await answer(running, tool_choice="required", parallel_tool_calls=False, seed=seed)
    assert len(alone["message"]["tool_calls"]) == 1


async def test_a_forced_call_in_a_stream_and_what_comes_of_it_in_the_next_turn(running: RunningGateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        given: Any = body(running, tool_choice=NAMED, seed=7)
        async with client.chat.completions.stream(**{**given, "tools": _strict(TOOLS)}) as stream:
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        check_arguments({"name": call.function.name, "arguments": call.function.arguments})
        turns = [
            *given["messages"],
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "Rain."},
        ]
        whole = await client.chat.completions.create(
            **{**given, "messages": turns, "tool_choice": "auto", "max_tokens": 4}
        )
    assert whole.usage is not None
    assert final.usage is None or whole.usage.prompt_tokens > final.usage.prompt_tokens


def _strict(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": NAMED, "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required", "min_tokens": 5}, "min_tokens"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "strange"}}}],
            },
            "tools",
        ),
    ],
)
async def test_a_choice_that_cannot_be_honoured_is_refused(
    running: RunningGateway, changes: dict[str, Any], param: str
) -> None:
    response = await running.client.post("/v1/chat/completions", json=body(running, **changes))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert running.at_rest
