"""OpenAI's Responses API, with the client that people use for it: the `openai` package."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
import pytest_asyncio
from antiphon_proto import worker_pb2 as pb
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai.types.responses import Response
from pydantic import SecretStr

from tests.support.fake_worker import TEMPLATE as PLAIN
from tests.support.fake_worker import Behaviour, Connection, FakeWorker, byte_card, byte_tokenizer, tokens
from tests.support.gateway import RunningGateway, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

HERMES = PLAIN + "{# <tool_call> #}"
THINKS = PLAIN.replace(
    "{{ message['content'] }}",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message['content'] }}{# <tool_call> #}",
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": name, "parameters": PARAMETERS, "strict": True}
    for name in ("get_weather", "now")
]
ARGUMENTS = '{"city": "Tromsø", "days": 2}'
TWO_CALLS = (
    f'Sure.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
THOUGHTFUL = f"<think>\nIt rains.\n</think>\n\n{TWO_CALLS}"
ASKED: dict[str, Any] = {"model": "test-model", "input": "What will the weather be?"}
CALLS = ["message", "function_call", "function_call"]
ANSWERS: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("Rain, naïvely 🏳️‍🌈.", {}, ["message"], "completed"),
    ("", {}, [], "completed"),
    (TWO_CALLS, {"tools": TOOLS}, CALLS, "completed"),
    (TWO_CALLS, {"tools": TOOLS, "tool_choice": "none"}, ["message"], "completed"),
    (TWO_CALLS, {"tools": TOOLS, "parallel_tool_calls": False}, CALLS[:2], "completed"),
    (THOUGHTFUL, {"tools": TOOLS, "reasoning": {"effort": "low"}}, ["reasoning", *CALLS], "completed"),
    ("Too long", {"max_output_tokens": 3}, ["message"], "incomplete"),
    (TWO_CALLS, {"tools": TOOLS, "max_output_tokens": 80}, CALLS[:2], "incomplete"),
    (THOUGHTFUL, {"max_output_tokens": 12}, ["reasoning"], "incomplete"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[RunningGateway]:
    """For requests that leave nothing behind."""
    async with running_gateway(FakeWorker(byte_card(context=500))) as running:
        yield running


def saying(text: str) -> Behaviour:
    """A model that answers so."""

    async def behaviour(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        await tokens(connection, submit, text.encode(), cached_tokens=5)
        if not text:
            connection.step(submit.ref, token_ids=[256], finish=pb.FINISH_STOP)

    return behaviour


def answering(text: str, template: str = HERMES, **card: Any) -> FakeWorker:
    return FakeWorker(byte_card(template=template, **card), behaviour=saying(text))


def prompts_of(worker: FakeWorker) -> list[str]:
    tokenizer = byte_tokenizer()
    return [tokenizer.decode(list(submit.prompt_token_ids), skip_special_tokens=False) for submit in worker.submits]


@contextlib.asynccontextmanager
async def sdk(worker: FakeWorker, key: str = "none", **options: Any) -> AsyncIterator[tuple[Any, RunningGateway]]:
    """The client as `Any`: what it types by OpenAI's dozens of items is told apart by tests as they run."""
    async with (
        running_gateway(worker, **options) as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield client, running


def told(response: Response) -> dict[str, Any]:
    """All of it but what is new each time; it is what OpenAI's own records allow."""
    page = response.model_dump(exclude_none=True)
    Response.model_validate(page)
    for name in ("id", "created_at", "completed_at"):
        page.pop(name, None)
    for item in page["output"]:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return page


async def test_a_stream_adds_up_to_the_whole_answer() -> None:
    worker = answering("", THINKS)
    async with sdk(worker) as (client, running):
        for text, asked, kinds, status in ANSWERS:
            worker.behaviour = saying(text)
            whole = await client.responses.create(**{**ASKED, **asked})
            events = [event async for event in await client.responses.create(**{**ASKED, **asked}, stream=True)]
            last = events[-1]
            assert last.type == f"response.{status}"
            assert told(last.response) == told(whole)
            assert ([item.type for item in whole.output], whole.status) == (kinds, status)
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
            names = [event.type for event in events]
            assert names.count("response.output_item.added") == names.count("response.output_item.done") == len(kinds)
            deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert deltas == whole.output_text
            if status == "incomplete":
                assert whole.incomplete_details is not None
                assert whole.incomplete_details.reason == "max_output_tokens"
                assert whole.output[-1].status == "incomplete"
        assert running.at_rest


async def test_the_clients_own_stream_helper_reads_it() -> None:
    async with (
        sdk(answering(THOUGHTFUL, THINKS)) as (client, _),
        client.responses.stream(**ASKED, tools=TOOLS) as stream,
    ):
        final = await stream.get_final_response()
    thought, message, first, second = final.output
    assert (thought.type, message.type, first.type, second.type) == ("reasoning", *CALLS)
    assert thought.content is not None
    assert thought.content[0].text == "It rains."
    assert final.output_text == "Sure."
    assert (first.name, first.arguments) == ("get_weather", ARGUMENTS)
    assert (second.name, second.arguments) == ("now", "{}")
    assert first.call_id != second.call_id


async def test_usage_and_what_was_asked_are_told() -> None:
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "metadata": {"who": "me"},
        "temperature": 0.5,
        "top_p": 0.5,
        "max_output_tokens": 100,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "now"},
    }
    worker = answering("Rain.")
    async with sdk(worker) as (client, _):
        whole = await client.responses.create(**ASKED, **asked)
    page = whole.model_dump(exclude_none=True)
    assert {name: page[name] for name in asked} == asked
    assert whole.usage is not None
    assert whole.usage.input_tokens == len(worker.submits[0].prompt_token_ids)
    assert (whole.usage.input_tokens_details.cached_tokens, whole.usage.output_tokens) == (5, 5)
    assert worker.submits[0].sampling.grammar.kind == pb.GRAMMAR_LARK, "the call is forced"
    assert worker.submits[0].sampling.max_tokens == 100


async def test_a_form_is_the_same_grammar_as_chats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named = {"name": "it", "schema": schema}
    worker = answering('{"a": 1}')
    async with sdk(worker) as (client, _):
        by_name = {"format": {"type": "json_schema", **named}}
        await client.responses.create(**ASKED, text=by_name, extra_body={"seed": 7})
        await client.responses.create(**ASKED, text={"format": {"type": "json_object"}})
        await client.chat.completions.create(
            model="test-model",
            messages=[{"role": "user", "content": ASKED["input"]}],
            response_format={"type": "json_schema", "json_schema": named},
            seed=7,
        )
    by_schema, by_kind, chats = worker.submits
    assert by_schema.sampling == chats.sampling
    assert by_schema.prompt_token_ids == chats.prompt_token_ids
    assert by_kind.sampling.grammar.kind == pb.GRAMMAR_JSON_OBJECT


class Temperature(pydantic.BaseModel):
    city: str
    degrees: int


async def test_a_form_given_as_a_record_is_read_back_as_one() -> None:
    async with sdk(answering('{"city": "Oslo", "degrees": 7}')) as (client, _):
        parsed = await client.responses.parse(**ASKED, text_format=Temperature)
        async with client.responses.stream(**ASKED, text_format=Temperature) as stream:
            streamed = await stream.get_final_response()
    assert parsed.output_parsed == streamed.output_parsed == Temperature(city="Oslo", degrees=7)


async def test_a_conversation_that_goes_on_has_the_prompt_of_the_whole_one() -> None:
    worker = answering(THOUGHTFUL, THINKS)
    asked: dict[str, Any] = {"model": "test-model", "tools": TOOLS}
    async with sdk(worker) as (client, _):
        first = await client.responses.create(**asked, input="How warm?", instructions="Not carried over.")
        calls = [item for item in first.output if item.type == "function_call"]
        results: list[Any] = [
            {"type": "function_call_output", "call_id": call.call_id, "output": call.name} for call in calls
        ]
        second = await client.responses.create(
            **asked, input=results, instructions="Be brief.", previous_response_id=first.id
        )
        assert await client.responses.delete(first.id) is None
        await client.responses.create(**asked, input="So?", previous_response_id=second.id)
        thanks: list[Any] = [
            {"role": "user", "content": "How warm?"},
            *(item.model_dump(exclude_none=True) for item in first.output),
            *results,
        ]
        await client.responses.create(**asked, input=thanks, instructions="Be brief.")
        so = [*(item.model_dump(exclude_none=True) for item in second.output), {"role": "user", "content": "So?"}]
        await client.responses.create(**asked, input=[*thanks, *so])
    _, going_on, further, whole, whole_further = prompts_of(worker)
    assert going_on == whole
    assert further == whole_further
    assert "<think>It rains.</think>Sure." in whole
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow warm?" in whole
    assert "<|im_start|>tool\nget_weather<|im_end|>\n<|im_start|>tool\nnow<|im_end|>" in whole


async def test_reasoning_without_its_text_leaves_no_trace() -> None:
    worker = answering(
        "Rain.", THINKS.replace("if message.reasoning_content", "if message.reasoning_content is defined")
    )
    empty = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [], "status": "in_progress"}
    answer = {"role": "assistant", "content": "Warm."}
    async with sdk(worker) as (client, _):
        for items in ([answer], [empty, answer]):
            await client.responses.create(model="test-model", input=[*items, {"role": "user", "content": "So?"}])
    plain, with_item = prompts_of(worker)
    assert with_item == plain


async def test_langchains_client_goes_on_with_a_conversation() -> None:
    worker = answering(THOUGHTFUL, THINKS)
    async with sdk(worker) as (_, running):
        model = ChatOpenAI(
            model="test-model", base_url=f"{running.url}/v1", api_key=SecretStr("none"), use_responses_api=True
        )
        with_tools = model.bind_tools(TOOLS)
        first = await with_tools.ainvoke("How warm?")
        results = [ToolMessage("7 C", tool_call_id=call["id"]) for call in first.tool_calls]
        await with_tools.ainvoke([HumanMessage("How warm?"), first, *results])
        await with_tools.ainvoke(results, previous_response_id=first.response_metadata["id"])
        pieces = [piece async for piece in with_tools.astream("How warm?")]
    _, whole, going_on, _ = prompts_of(worker)
    assert going_on == whole
    streamed = functools.reduce(operator.add, pieces)
    names = ["get_weather", "now"]
    assert [call["name"] for call in first.tool_calls] == [call["name"] for call in streamed.tool_calls] == names


async def test_what_is_kept_can_be_read_and_deleted_and_only_by_its_tenant() -> None:
    worker = answering("Rain.")
    async with sdk(worker, key="k1", keys={"k1": "one", "k2": "two"}) as (client, running):
        whole = await client.responses.create(**ASKED)
        streamed = [event async for event in await client.responses.create(**ASKED, stream=True)][-1]
        assert streamed.type == "response.completed"
        for answer in (whole, streamed.response):
            assert await client.responses.retrieve(answer.id) == answer
            told_why = await running.client.get(
                f"/v1/antiphon/explain/{answer.id}", headers={"authorization": "Bearer k1"}
            )
            assert told_why.status_code == 200
        other = client.with_options(api_key="k2")
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(whole.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.delete(whole.id)
        with pytest.raises(openai.BadRequestError, match="go on with") as refused:
            await other.responses.create(**ASKED, previous_response_id=whole.id)
        assert refused.value.code == "previous_response_not_found"
        deleted = await running.client.delete(f"/v1/responses/{whole.id}", headers={"authorization": "Bearer k1"})
        assert deleted.json() == {"id": whole.id, "object": "response", "deleted": True}
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(whole.id)
        not_kept = await client.responses.create(**ASKED, store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(not_kept.id)
        assert len(running.gateway.responses) == 1


async def test_a_gateway_that_keeps_nothing_says_so() -> None:
    async with sdk(answering("Rain."), responses_stored=0) as (client, _):
        whole = await client.responses.create(**ASKED)
        assert whole.model_dump()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(whole.id)
        with pytest.raises(openai.BadRequestError, match="responses-stored"):
            await client.responses.create(**ASKED, store=True)


async def test_an_answer_too_large_to_keep_says_that_it_is_not_kept() -> None:
    async with sdk(answering("Rain."), responses_max_bytes=1500) as (client, running):
        whole = await client.responses.create(**ASKED)
        assert whole.model_dump()["store"] is False
        assert len(running.gateway.responses) == 0


async def test_a_failure_in_mid_stream_is_the_streams_last_event_and_is_not_kept() -> None:
    async def fail(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        await tokens(connection, submit, b"ab", finish=False)
        connection.step(submit.ref, finish=pb.FINISH_ERROR, error="out of luck")

    async with sdk(FakeWorker(behaviour=fail)) as (client, running):
        events = [event async for event in await client.responses.create(**ASKED, stream=True)]
        last = events[-1]
        assert last.type == "response.failed"
        assert last.response.status == "failed"
        assert last.response.error is not None
        assert "out of luck" in last.response.error.message
        assert last.response.output_text == "ab"
        with pytest.raises(openai.APIStatusError, match="out of luck"):
            await client.responses.create(**ASKED)
        assert len(running.gateway.responses) == 0
        assert running.at_rest


async def test_an_answer_ends_where_the_context_does() -> None:
    async with sdk(FakeWorker(byte_card(context=200))) as (client, _):
        whole = await client.responses.create(**ASKED, max_output_tokens=1000)
        assert (whole.status, whole.usage and whole.usage.total_tokens) == ("incomplete", 200)


IMAGE = {"type": "input_image", "image_url": "https://example.org/cat.png"}
MESSAGE = {"role": "user", "content": [IMAGE]}
RESULT = {"type": "function_call_output", "call_id": "call_x", "output": "7"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [MESSAGE]}, "input[0].content[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0]"),
        ({"input": [RESULT]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"conversation": "conv_x"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"metadata": {"x": "y" * 513}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
async def test_what_cannot_be_is_refused_with_its_place(
    shared: RunningGateway, changes: dict[str, Any], param: str
) -> None:
    response = await shared.client.post("/v1/responses", json={**ASKED, **changes})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert param in response.json()["error"]["message"]


async def test_what_has_no_effect_is_named(shared: RunningGateway) -> None:
    asked = {**ASKED, "reasoning": {"effort": "low", "summary": "auto"}, "text": {"novel": 1}, "unheard": 2}
    response = await shared.client.post("/v1/responses", json=asked)
    assert response.status_code == 200
    named = response.headers["x-antiphon-ignored"].split(", ")
    assert sorted(named) == ["reasoning.effort", "reasoning.summary", "text.novel", "unheard"]


async def test_paths_below_an_answer_are_not_there(shared: RunningGateway) -> None:
    assert (await shared.client.get("/v1/responses/resp_x/input_items")).json()["error"]["code"] == "unknown_url"
    assert (await shared.client.put("/v1/responses/resp_x")).status_code == 405
