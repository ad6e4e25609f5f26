"""Anthropic's Messages API, with the client that people use for it: the `anthropic` package."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic.types import Message, MessageParam, ToolParam
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import TEMPLATE as PLAIN
from tests.support.fake_worker import Behaviour, Connection, FakeWorker, byte_card, byte_tokenizer, tokens
from tests.support.gateway import RunningGateway, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

HERMES = PLAIN + "{# <tool_call> #}"
THINKS = HERMES + "{# </think> #}"
MESSAGES: list[MessageParam] = [{"role": "user", "content": "What will the weather be?"}]
TOOLS: list[ToolParam] = [
    {"name": name, "description": name, "input_schema": {"type": "object"}} for name in ("get_weather", "now")
]
ASKED: dict[str, Any] = {"model": "test-model", "messages": MESSAGES, "max_tokens": 4096}
ARGUMENTS = '{"city": "Troms\u00f8", "days": 2}'
TWO_CALLS = (
    f'Sure.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def saying(text: str) -> Behaviour:
    """A model that answers so."""

    async def behaviour(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        await tokens(connection, submit, text.encode(), cached_tokens=5)
        if not text:
            connection.step(submit.ref, token_ids=[256], finish=pb.FINISH_STOP)

    return behaviour


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[RunningGateway]:
    """For requests that leave nothing behind."""
    async with running_gateway(FakeWorker()) as running:
        yield running


def prompt_of(worker: FakeWorker) -> str:
    """The text that the last request came to."""
    return byte_tokenizer().decode(list(worker.submits[-1].prompt_token_ids), skip_special_tokens=False)


@contextlib.asynccontextmanager
async def sdk(
    worker: FakeWorker, key: str = "none", **options: Any
) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, RunningGateway]]:
    async with (
        running_gateway(worker, **options) as running,
        anthropic.AsyncAnthropic(base_url=running.url, api_key=key, max_retries=0) as client,
    ):
        yield client, running


def answering(text: str, template: str = HERMES, **card: Any) -> FakeWorker:
    return FakeWorker(byte_card(template=template, **card), behaviour=saying(text))


async def streamed(client: anthropic.AsyncAnthropic, **asked: Any) -> tuple[Message, list[Any]]:
    """The message as the client puts it together, and the events that it was made of."""
    events = []
    async with client.messages.stream(**{**ASKED, **asked}) as stream:
        async for event in stream:
            events.append(event)
        return await stream.get_final_message(), events


def told(message: Message) -> dict[str, Any]:
    """All of it but what is new each time."""
    page = message.model_dump(exclude_none=True)
    del page["id"]
    for block in page["content"]:
        for name in ("id", "signature", "parsed_output"):
            block.pop(name, None)
    return page


THOUGHTFUL = f"<think>\nIt rains.\n</think>\n\n{TWO_CALLS}"
ANSWERS: list[tuple[str, dict[str, Any], list[str], str]] = [
    ("Rain, naïvely 🏳️‍🌈.", {}, ["text"], "end_turn"),
    ("", {}, [], "end_turn"),
    (TWO_CALLS, {"tools": TOOLS}, ["text", "tool_use", "tool_use"], "tool_use"),
    (TWO_CALLS.removeprefix("Sure.\n"), {"tools": TOOLS}, ["tool_use", "tool_use"], "tool_use"),
    (TWO_CALLS, {"tools": TOOLS, "tool_choice": {"type": "none"}}, ["text"], "end_turn"),
    (
        TWO_CALLS,
        {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ["text", "tool_use"],
        "tool_use",
    ),
    (
        THOUGHTFUL,
        {"tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        ["thinking", "text", "tool_use", "tool_use"],
        "tool_use",
    ),
    (THOUGHTFUL, {"thinking": {"type": "adaptive"}}, ["thinking", "text"], "end_turn"),
    (THOUGHTFUL, {"thinking": {"type": "adaptive", "display": "omitted"}}, ["text"], "end_turn"),
    (THOUGHTFUL, {"thinking": {"type": "disabled"}}, ["text"], "end_turn"),
    (THOUGHTFUL, {}, ["text"], "end_turn"),
    ("Too long", {"max_tokens": 3}, ["text"], "max_tokens"),
]


async def test_a_stream_adds_up_to_the_whole_answer() -> None:
    worker = answering("", THINKS)
    async with sdk(worker) as (client, running):
        for text, asked, kinds, reason in ANSWERS:
            worker.behaviour = saying(text)
            whole = await client.messages.create(**{**ASKED, **asked})
            message, events = await streamed(client, **asked)
            assert told(message) == told(whole)
            assert ([block.type for block in whole.content], whole.stop_reason) == (kinds, reason)
            assert events[0].type == "message_start"
            assert [event.type for event in events].count("message_stop") == 1
            assert events[-1].type == "message_stop"
        assert running.at_rest


async def test_calls_and_thoughts_are_what_the_model_wrote() -> None:
    asked = {"tools": TOOLS, "thinking": {"type": "adaptive"}}
    async with sdk(answering(THOUGHTFUL, THINKS)) as (client, _):
        for message in (await client.messages.create(**{**ASKED, **asked}), (await streamed(client, **asked))[0]):
            thought, text, first, second = message.content
            assert (thought.type, text.type, first.type, second.type) == ("thinking", "text", "tool_use", "tool_use")
            assert (thought.thinking, text.text) == ("It rains.", "Sure.")
            assert (first.name, first.input) == ("get_weather", json.loads(ARGUMENTS))
            assert (second.name, second.input) == ("now", {})
            assert first.id != second.id
            assert message.id.startswith("msg_")
            assert thought.signature


async def test_a_call_that_is_cut_is_told_as_far_as_it_came() -> None:
    length = len(TWO_CALLS.partition("days")[0].encode())
    asked: dict[str, Any] = {**ASKED, "tools": TOOLS, "max_tokens": length}
    async with sdk(answering(TWO_CALLS)) as (client, _):
        whole = await client.messages.create(**asked)
        events = [event async for event in await client.messages.create(**asked, stream=True)]
    pieces = [event.delta.partial_json for event in events if getattr(event, "delta", None) and "json" in repr(event)]
    assert whole.stop_reason == "max_tokens"
    assert whole.content[-1].input == {"INVALID_JSON": "".join(pieces)}  # type: ignore[union-attr]
    assert ARGUMENTS.startswith("".join(pieces))
    assert len(pieces) > 3, "they are told as they come"
    kinds = [event.type for event in events]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


async def test_the_stop_sequence_that_ended_it_is_named() -> None:
    async def stop(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        connection.step(submit.ref, token_ids=[65], text="a")
        connection.step(submit.ref, token_ids=[66], text="b", finish=pb.FINISH_STOP, stop_reason="END")

    worker = FakeWorker(behaviour=stop)
    stops = [str(number) for number in range(8)] + ["END"]
    async with sdk(worker) as (client, _):
        whole = await client.messages.create(**ASKED, stop_sequences=stops)
        message, _ = await streamed(client, stop_sequences=stops)
    for answer in (whole, message):
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert list(worker.submits[0].sampling.stop) == stops


async def test_counts_and_usage_agree() -> None:
    conversation: dict[str, Any] = {"messages": MESSAGES, "system": "Be brief.", "tools": TOOLS}
    async with sdk(answering("Rain.")) as (client, _):
        counted = await client.messages.count_tokens(model="test-model", **conversation)
        whole = await client.messages.create(**{**ASKED, **conversation})
    usage = whole.usage
    assert usage.cache_read_input_tokens == 5
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert (usage.output_tokens, usage.cache_creation_input_tokens) == (5, 0)


async def test_a_conversation_reaches_the_template() -> None:
    worker = answering("Rain.")
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "warm?"}]},
        {"role": "user", "content": "In Oslo."},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "7 C"}]},
                {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": "late"},
                {"type": "text", "text": "So?"},
            ],
        },
        {"role": "assistant", "content": "It is"},
    ]
    async with sdk(worker) as (client, _):
        await client.messages.create(
            model="test-model", max_tokens=9, messages=messages, system=[{"type": "text", "text": "Be brief."}]
        )
    call = '[{"id": "toolu_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}]'
    turns = [
        ("system", "Be brief."),
        ("user", "How warm?\nIn Oslo."),
        ("assistant", f"I look.{call}"),
        ("tool", "7 C"),
        ("tool", "Error: late"),
        ("user", "So?"),
    ]
    written = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert prompt_of(worker) == f"{written}<|im_start|>assistant\nIt is", "the answer goes on with the last message"


async def test_what_models_are_told_of_thinking_and_effort() -> None:
    template = "{{ enable_thinking }} {{ thinking_budget }} {{ reasoning_effort }}{# </think> #}"
    worker = answering("Rain.", template)
    async with sdk(worker) as (client, _):
        await client.messages.create(
            **ASKED, thinking={"type": "enabled", "budget_tokens": 2048}, output_config={"effort": "low"}
        )
        assert prompt_of(worker) == "True 2048 low"
        await client.messages.create(**ASKED)
        assert prompt_of(worker).startswith("False")


async def test_calls_and_forms_that_are_forced_are_a_grammar_for_the_worker() -> None:
    worker = answering(TWO_CALLS)
    forms: list[dict[str, Any]] = [
        {"tools": TOOLS, "tool_choice": {"type": "any"}},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "now"}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
    ]
    async with sdk(worker) as (client, _):
        for asked in forms:
            await client.messages.create(**{**ASKED, **asked})
    several, one, form = (submit.sampling.grammar for submit in worker.submits)
    assert (several.kind, one.kind, form.kind) == (pb.GRAMMAR_LARK, pb.GRAMMAR_LARK, pb.GRAMMAR_JSON_SCHEMA)
    assert "get_weather" in several.text
    assert "get_weather" not in one.text


async def test_an_answer_ends_where_the_context_does() -> None:
    worker = FakeWorker(byte_card(context=200))
    async with sdk(worker) as (client, _):
        message = await client.messages.create(**ASKED)
        assert message.stop_reason == "model_context_window_exceeded"
        assert message.usage.input_tokens + message.usage.output_tokens == 200
        with pytest.raises(anthropic.BadRequestError, match="maximum context length is 200"):
            await client.messages.create(**{**ASKED, "system": "long " * 50})


async def test_errors_become_the_clients_own() -> None:
    async def refuse(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.refuse(submit.ref, pb.REFUSAL_CAPACITY)

    async with sdk(FakeWorker(behaviour=refuse), key="k1", keys={"k1": "tenant"}, queue_size=0) as (client, running):
        assert [model.id async for model in client.models.list()] == ["test-model"]
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(**ASKED)
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.create(**{**ASKED, "model": "other"})
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(**ASKED, extra_body={"temperature": 9.0})
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="k2").messages.create(**ASKED)
        bearer = anthropic.AsyncAnthropic(base_url=running.url, auth_token="k1", max_retries=0)
        assert (await bearer.messages.count_tokens(model="test-model", messages=MESSAGES)).input_tokens
        await bearer.close()


async def test_an_error_in_mid_stream_is_the_streams_last_event() -> None:
    async def fail(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        await tokens(connection, submit, b"ab", finish=False)
        connection.step(submit.ref, finish=pb.FINISH_ERROR, error="out of luck")

    async with sdk(FakeWorker(behaviour=fail)) as (client, running):
        with pytest.raises(anthropic.APIStatusError, match="out of luck"):
            await streamed(client)
        raw = (await running.client.post("/v1/messages", json={**ASKED, "stream": True})).text
    assert raw.startswith("event: message_start\ndata: ")
    assert (
        raw.rstrip().rpartition("\n\n")[2].startswith('event: error\ndata: {"type":"error","error":{"type":"api_error"')
    )
    assert "message_stop" not in raw


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/cat.png"}}
RESULT = {"type": "tool_result", "tool_use_id": "x"}


@pytest.mark.parametrize(
    ("path", "changes", "said"),
    [
        ("/v1/messages", {"max_tokens": None}, "max_tokens"),
        ("/v1/messages", {"max_tokens": 0}, "max_tokens"),
        ("/v1/messages", {"messages": []}, "messages"),
        ("/v1/messages", {"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type: 'image'"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [RESULT]}]}, "messages.0.content.0.tool_use_id"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0"),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": [RESULT]}]}, "messages.0.content.0"),
        ("/v1/messages", {"messages": [*MESSAGES, {"role": "assistant", "content": "It is "}]}, "white space"),
        ("/v1/messages", {"system": [IMAGE]}, "system.0.type"),
        ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ("/v1/messages", {"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": {}, "strict": True}]}, "tools.0.strict"),
        ("/v1/messages", {"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ("/v1/messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("/v1/messages", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ("/v1/messages", {"thinking": {"type": "adaptive", "budget_tokens": "a"}}, "thinking.budget_tokens"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "not known to think"),
        ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences"),
        ("/v1/messages", {"mcp_servers": [{}]}, "mcp_servers"),
        ("/v1/messages", {"container": "x"}, "container"),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
            "output_config",
        ),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0"),
    ],
)
async def test_what_is_wrong_is_said_where_it_is(
    shared: RunningGateway, path: str, changes: dict[str, Any], said: str
) -> None:
    body = {key: value for key, value in {**ASKED, **changes}.items() if value is not None}
    response = await shared.client.post(path, json=body)
    page = response.json()
    assert (response.status_code, page["type"], page["error"]["type"]) == (400, "error", "invalid_request_error")
    assert said in page["error"]["message"]
    assert page["request_id"] == response.headers["x-request-id"]


async def test_all_that_goes_wrong_on_the_path_has_its_shape(shared: RunningGateway) -> None:
    for method, path, status, kind in [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("POST", "/v1/messages", 400, "invalid_request_error"),
    ]:
        response = await shared.client.request(method, path, content=b"{")
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert "param" in (await shared.client.post("/v1/messagesx")).json()["error"], "OpenAI's everywhere else"


async def test_what_has_no_effect_is_named(shared: RunningGateway) -> None:
    body = {**ASKED, "max_tokens": 1, "metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}}
    headers = {"anthropic-version": "2023-06-01"}
    response = await shared.client.post("/v1/messages", json=body, headers=headers)
    assert (response.status_code, response.headers.get("x-antiphon-ignored")) == (200, None)
    response = await shared.client.post("/v1/messages", json={**body, "novel": 1, "output_config": {"effort": "low"}})
    assert response.headers["x-antiphon-ignored"] == "novel, output_config.effort"
    del body["max_tokens"]
    response = await shared.client.post("/v1/messages/count_tokens", json={**body, "novel": 1})
    assert response.headers["x-antiphon-ignored"] == "metadata, novel"
