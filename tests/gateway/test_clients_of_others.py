"""Clients that applications are written with: LangChain's, LiteLLM's, and what else OpenAI's own can do.

Their base URL is the gateway's, and nothing else is changed. What they send of themselves (fields, headers) and what
they make of answers is theirs; the answers are scripted.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it looks for a newer one when it is imported

import litellm
import openai
import pytest
from antiphon_proto import worker_pb2 as pb
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from openai.types.chat import ChatCompletionUserMessageParam
from pydantic import BaseModel

from tests.support.fake_worker import TEMPLATE as PLAIN
from tests.support.fake_worker import Connection, FakeWorker, byte_card, byte_tokenizer, tokens
from tests.support.gateway import RunningGateway, running_gateway

pytestmark = [
    pytest.mark.filterwarnings("ignore:Item:UserWarning"),  # of types that LiteLLM declares
    pytest.mark.filterwarnings("ignore:Accessing the:DeprecationWarning"),
]

HERMES = PLAIN + "{# <tool_call> #}"
CALL = '{"name": "get_weather", "arguments": {"city": "Troms\u00f8"}}'
FORCED = f"<tool_call>\n{CALL}\n</tool_call>"
ASKED: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "What will the weather be?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


class City(BaseModel):
    """A city."""

    name: str
    inhabitants: int


TROMSO = '{"name": "Troms\u00f8", "inhabitants": 77000}'


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"wet in {city}"


@contextlib.asynccontextmanager
async def answering(text: str) -> AsyncIterator[tuple[RunningGateway, FakeWorker]]:
    """A gateway whose model says this, whatever it is asked."""

    async def behaviour(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        await tokens(connection, submit, text.encode(), cached_tokens=3)

    worker = FakeWorker(byte_card(template=HERMES), behaviour=behaviour)
    async with running_gateway(worker) as running:
        yield running, worker
        assert running.at_rest


def prompt_of(worker: FakeWorker) -> str:
    return byte_tokenizer().decode(list(worker.submits[-1].prompt_token_ids), skip_special_tokens=False)


def langchain(running: RunningGateway, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="test-model", base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=20, **options
    )


async def lite(running: RunningGateway, **options: Any) -> Any:
    return await litellm.acompletion(
        **{
            "model": "openai/test-model",
            "api_base": f"{running.url}/v1",
            "api_key": "none",
            "messages": ASKED,
            "num_retries": 0,
            "timeout": 20,
            **options,
        }
    )


async def test_langchain_invokes_and_streams() -> None:
    async with answering("Wet, \u00e9.") as (running, worker):
        chat = langchain(running, temperature=0.5, max_tokens=50, seed=3, stop=["\n\n"], logprobs=True)
        answer = await chat.ainvoke([SystemMessage("Be brief."), HumanMessage("What will the weather be?")])
        assert answer.content == "Wet, \u00e9."
        assert answer.response_metadata["finish_reason"] == "stop"
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] == 8
        assert answer.usage_metadata["input_token_details"]["cache_read"] == 3
        assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt_of(worker)
        sampling = worker.submits[-1].sampling
        assert (sampling.max_tokens, sampling.seed, list(sampling.stop)) == (50, 3, ["\n\n"])
        whole: AIMessageChunk | None = None
        pieces = 0
        async for chunk in langchain(running, stream_usage=True).astream("Hi"):
            assert isinstance(chunk, AIMessageChunk)
            whole = chunk if whole is None else whole + chunk
            pieces += bool(chunk.content)
        assert whole is not None
        assert (whole.content, pieces) == ("Wet, \u00e9.", 7)
        assert whole.usage_metadata is not None
        assert whole.usage_metadata["output_tokens"] == 8
        plain = OpenAI(model="test-model", base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        assert await plain.ainvoke("Once") == "Wet, \u00e9."
        batch = await chat.abatch(["a", "b"])
        assert [message.content for message in batch] == ["Wet, \u00e9."] * 2


async def test_langchain_binds_tools_and_sends_their_results_back() -> None:
    async with answering(FORCED) as (running, worker):
        bound = langchain(running).bind_tools([get_weather])
        asked: list[Any] = [HumanMessage("Weather?")]
        answer = await bound.ainvoke(asked)
        assert isinstance(answer, AIMessage)
        [call] = answer.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Troms\u00f8"})
        whole: Any = None
        async for chunk in bound.astream(asked):
            whole = chunk if whole is None else whole + chunk
        assert [(call["name"], call["args"]) for call in whole.tool_calls] == [(call["name"], call["args"])]
        assert whole.response_metadata["finish_reason"] == "tool_calls"
        result = await get_weather.ainvoke(call)
        assert isinstance(result, ToolMessage)
        await bound.ainvoke([*asked, answer, result])
        prompt = prompt_of(worker)
        assert "<|im_start|>tool\nwet in Troms\u00f8<|im_end|>" in prompt
        assert '"arguments": {"city": "Troms\u00f8"}' in prompt
        forced = langchain(running).bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
        answer = await forced.ainvoke(asked)
        assert isinstance(answer, AIMessage)
        assert [call["name"] for call in answer.tool_calls] == ["get_weather"]
        assert worker.submits[-1].sampling.HasField("grammar")


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
async def test_langchain_has_structured_output(method: Any) -> None:
    call = f'<tool_call>\n{{"name": "City", "arguments": {TROMSO}}}\n</tool_call>'
    async with answering(call if method == "function_calling" else TROMSO) as (running, worker):
        city = await langchain(running).with_structured_output(City, method=method).ainvoke("Which city? In JSON.")
        assert city == City(name="Troms\u00f8", inhabitants=77000)
        assert worker.submits[-1].sampling.HasField("grammar")


async def test_litellm_completes_and_streams() -> None:
    async with answering("Wet.") as (running, _):
        answer = await lite(running, max_tokens=20, temperature=0, top_p=0.9, seed=1, n=2, user="me", stop=["x"])
        assert [choice.message.content for choice in answer.choices] == ["Wet.", "Wet."]
        assert answer.usage.completion_tokens == 8
        assert answer.usage.prompt_tokens_details.cached_tokens == 3
        stream = await lite(running, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Wet."
        assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == 4
        text = await litellm.atext_completion(
            model="text-completion-openai/test-model", prompt="Once", api_base=f"{running.url}/v1", api_key="none"
        )
        assert text.choices[0].text == "Wet."


async def test_litellm_calls_tools_and_has_structured_output() -> None:
    async with answering(FORCED) as (running, worker):
        answer = await lite(running, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True)
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Troms\u00f8"})
        result = {"role": "tool", "tool_call_id": call.id, "content": "wet"}
        chunks = [
            chunk
            async for chunk in await lite(
                running, messages=[*ASKED, choice.message.model_dump(), result], tools=TOOLS, stream=True
            )
        ]
        assert "<|im_start|>tool\nwet<|im_end|>" in prompt_of(worker)
        [again] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert again.function.arguments == call.function.arguments
    async with answering(TROMSO) as (running, worker):
        answer = await lite(running, response_format=City)
        assert City.model_validate_json(answer.choices[0].message.content).inhabitants == 77000
        assert worker.submits[-1].sampling.HasField("grammar")


async def test_litellm_has_its_own_errors() -> None:
    async with answering("no") as (running, _):
        with pytest.raises(litellm.BadRequestError, match="temperature"):
            await lite(running, temperature=9)
        with pytest.raises(litellm.NotFoundError):
            await lite(running, model="openai/other")


async def test_openais_client_makes_its_further_calls() -> None:
    async with (
        answering(TROMSO) as (running, worker),
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert (await client.models.retrieve("test-model")).id == "test-model"
        parsed = await client.chat.completions.parse(model="test-model", messages=ASKED, response_format=City)
        assert parsed.choices[0].message.parsed == City(name="Troms\u00f8", inhabitants=77000)
        assert worker.submits[-1].sampling.HasField("grammar")
        async with client.chat.completions.stream(
            model="test-model", messages=ASKED, response_format=City, stream_options={"include_usage": True}
        ) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert final.choices[0].message.parsed == City(name="Troms\u00f8", inhabitants=77000)
        assert final.usage is not None
        assert final.usage.completion_tokens == len(TROMSO.encode())
        raw = await client.chat.completions.with_raw_response.create(
            model="test-model", messages=ASKED, extra_headers={"x-request-id": "mine"}, extra_body={"top_k": 5}
        )
        assert raw.headers["x-request-id"] == "mine"
        assert worker.submits[-1].sampling.top_k == 5
        completion = await client.completions.create(
            model="test-model", prompt="a", max_tokens=99, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in completion]
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == TROMSO
        assert chunks[-1].usage is not None


async def test_openais_client_reads_calls_as_they_stream() -> None:
    async with (
        answering(FORCED) as (running, _),
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(model="test-model", messages=ASKED, tools=TOOLS) as stream,
    ):
        done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = await stream.get_final_completion()
        assert [json.loads(event.arguments) for event in done] == [{"city": "Troms\u00f8"}]
        [call] = final.choices[0].message.tool_calls or []
        assert call.function.name == "get_weather"
