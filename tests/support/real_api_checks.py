"""Tools, schemas, `/v1/responses` and `/v1/messages` with the SDKs, against a server whose model is a real one.

A model of 135 million parameters calls tools and writes JSON only because the engine lets it write nothing else: what
is looked at is the form of what comes, how it streams, and that conversations go on. The model's template has to have a
place for tools (`models.demo_model_with_tools`).
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tests.support.openai_cases import Check

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Troms\u00f8"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "now": NOTHING}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
QUESTION = "What will the weather be in Oslo tomorrow?"


def _client(base_url: str) -> Any:
    """As `Any`: what it types by dozens of items is told apart as the checks run."""
    return openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=120)


def _anthropic(base_url: str) -> Any:
    return anthropic.AsyncAnthropic(base_url=base_url, api_key="none", max_retries=0, timeout=120)


def _check_arguments(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def _asked(model: str, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": model, "messages": messages, "tools": TOOLS, "max_tokens": 400, "temperature": 0.7} | changes


async def a_required_call(base_url: str, model: str) -> None:
    """One or several; one where parallel calls are off."""
    async with _client(base_url) as client:
        for seed, parallel in ((1, True), (2, True), (3, False)):
            answer = await client.chat.completions.create(
                **_asked(model, tool_choice="required", seed=seed, parallel_tool_calls=parallel)
            )
            [choice] = answer.choices
            assert choice.message.tool_calls
            assert parallel or len(choice.message.tool_calls) == 1
            if choice.finish_reason == "length":
                continue  # It liked calls so much that it was cut in one.
            assert choice.finish_reason == "tool_calls"
            assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)
            for call in choice.message.tool_calls:
                _check_arguments(call.function.name, call.function.arguments)


async def a_named_call_streamed_as_whole(base_url: str, model: str) -> None:
    """And the conversation goes on with its result."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    asked = _asked(model, tool_choice=named, seed=5)
    async with _client(base_url) as client:
        whole = (await client.chat.completions.create(**asked)).choices[0]
        [call] = whole.message.tool_calls
        assert (call.function.name, whole.finish_reason) == ("get_weather", "stop")
        _check_arguments(call.function.name, call.function.arguments)
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        deltas = [delta for choice in choices for delta in choice.delta.tool_calls or ()]
        assert [delta.function.name for delta in deltas if delta.function.name] == ["get_weather"]
        assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments
        assert len(deltas) > 2, "arguments come as they are written"
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
        turns = [
            *asked["messages"],
            whole.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "Rain, 7 degrees."},
        ]
        after = await client.chat.completions.create(**_asked(model, messages=turns, tool_choice="none", max_tokens=8))
        assert after.choices[0].message.content
        assert not after.choices[0].message.tool_calls


async def a_schema_beside_tools(base_url: str, model: str) -> None:
    """Where they may not be called; where they may, two things cannot both be the whole answer."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    async with _client(base_url) as client:
        for stream in (False, True):
            asked = _asked(model, tool_choice="none", response_format=form, seed=9)
            if stream:
                events = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
                text = "".join(chunk.choices[0].delta.content or "" for chunk in events if chunk.choices)
            else:
                text = (await client.chat.completions.create(**asked)).choices[0].message.content
            jsonschema.validate(json.loads(text), WEATHER)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**_asked(model, response_format=form))
        assert refused.value.param == "response_format"


async def responses(base_url: str, model: str) -> None:
    """Created, streamed, gone on with, read again, deleted."""
    asked = {"model": model, "input": "Name three primary colours.", "max_output_tokens": 24, "temperature": 0}
    async with _client(base_url) as client:
        whole = await client.responses.create(**asked)
        assert whole.output_text
        assert whole.status in ("completed", "incomplete")
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        assert events[-1].type == f"response.{whole.status}"
        final = events[-1].response
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == final.output_text == whole.output_text
        assert final.usage.output_tokens == whole.usage.output_tokens
        # Where it goes on with no more than an id, the prompt is that of the whole conversation.
        item = {"role": "assistant", "content": whole.output_text}
        items = [{"role": "user", "content": asked["input"]}, item, {"role": "user", "content": "And a fourth?"}]
        by_items = await client.responses.create(**{**asked, "input": items})
        by_id = await client.responses.create(**{**asked, "input": "And a fourth?", "previous_response_id": whole.id})
        assert by_id.usage.input_tokens == by_items.usage.input_tokens > whole.usage.input_tokens
        assert by_id.output_text == by_items.output_text
        assert (await client.responses.retrieve(by_id.id)).output_text == by_id.output_text
        await client.responses.delete(by_id.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(by_id.id)


async def responses_with_a_tool(base_url: str, model: str) -> None:
    """The call, its result, the answer."""
    tools = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
    asked = {"model": model, "tools": tools, "max_output_tokens": 200, "temperature": 0}
    async with _client(base_url) as client:
        first = await client.responses.create(
            **asked, input=QUESTION, tool_choice={"type": "function", "name": "get_weather"}
        )
        [call] = [item for item in first.output if item.type == "function_call"]
        _check_arguments(call.name, call.arguments)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain, 7 degrees."}
        second = await client.responses.create(
            **{**asked, "max_output_tokens": 8}, input=[result], previous_response_id=first.id
        )
        assert second.output
        assert second.usage.input_tokens > first.usage.input_tokens


async def messages_with_a_tool(base_url: str, model: str) -> None:
    """The call, streamed and whole, its result, the answer; the prompt is as long as it was said to be."""
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    asked: dict[str, Any] = {"model": model, "tools": tools, "messages": [{"role": "user", "content": QUESTION}]}
    options = {"max_tokens": 200, "extra_body": {"temperature": 0}}
    choice = {"type": "tool", "name": "get_weather"}
    async with _anthropic(base_url) as client:
        counted = await client.messages.count_tokens(**asked)
        whole = await client.messages.create(**asked, **options, tool_choice=choice)
        [use] = whole.content
        assert (use.type, use.name, whole.stop_reason) == ("tool_use", "get_weather", "tool_use")
        jsonschema.validate(use.input, WEATHER)
        assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        async with client.messages.stream(**asked, **options, tool_choice=choice) as stream:
            streamed = await stream.get_final_message()
        assert streamed.content[0].input == use.input
        turns = [
            *asked["messages"],
            {"role": "assistant", "content": [use.model_dump(include={"type", "id", "name", "input"})]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "Rain."}]},
        ]
        after = await client.messages.create(
            **{**asked, "messages": turns}, tool_choice={"type": "none"}, max_tokens=8, extra_body={"temperature": 0}
        )
        assert after.content[0].text


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        a_required_call,
        a_named_call_streamed_as_whole,
        a_schema_beside_tools,
        responses,
        responses_with_a_tool,
        messages_with_a_tool,
    )
}
