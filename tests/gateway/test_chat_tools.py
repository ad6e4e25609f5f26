"""Calls of tools and reasoning through the gateway: whole, streamed, and with a client that people use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
from antiphon_gateway.options import GatewayOptions
from antiphon_gateway.tools import REASONING_PARSERS, TOOL_PARSERS
from antiphon_proto import worker_pb2 as pb
from antiphon_worker.detokenize import Detokenizer, special_token_ids
from openai.types.chat import ChatCompletionUserMessageParam
from tokenizers import Tokenizer

from tests.support.fake_worker import TEMPLATE as PLAIN
from tests.support.fake_worker import Behaviour, Connection, FakeWorker, byte_card, byte_tokenizer, tokens
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.openai_cases import Stream, parse_stream

HERMES = PLAIN + "{# <tool_call> #}"
MISTRAL = PLAIN + "{# [TOOL_CALLS] #}"
THINKS = PLAIN + "{# </think> #}"
THINKING = HERMES.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

ARGUMENTS = '{"city": "Troms\u00f8", "days": 2}'
TWO_CALLS = (
    f'Sure.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get_weather", "now")
]
MESSAGES = [{"role": "user", "content": "What will the weather be?"}]
BODY = {"model": "test-model", "messages": MESSAGES, "tools": TOOLS, "seed": 1}


def saying(*texts: str) -> Behaviour:
    """A model that answers so, each choice with its own."""

    async def behaviour(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        await tokens(connection, submit, texts[submit.sampling.choice % len(texts)].encode())

    return behaviour


@contextlib.asynccontextmanager
async def answering(*texts: str, template: str = HERMES, **options: Any) -> AsyncIterator[RunningGateway]:
    worker = FakeWorker(byte_card(template=template), behaviour=saying(*texts))
    async with running_gateway(worker, **options) as running:
        yield running


async def whole(running: RunningGateway, **changes: Any) -> list[dict[str, Any]]:
    response = await running.client.post("/v1/chat/completions", json={**BODY, **changes})
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


async def streamed(running: RunningGateway, **changes: Any) -> Stream:
    response = await running.client.post("/v1/chat/completions", json={**BODY, "stream": True, **changes})
    assert response.status_code == 200, response.text
    stream = parse_stream(response.content)
    assert stream.done == 1
    return stream


def joined(stream: Stream, index: int = 0) -> dict[str, Any]:
    """A choice's message, put together from its deltas as clients do it."""
    message: dict[str, Any] = {"content": None, "reasoning": "", "calls": [], "finish": stream.finish_reasons(index)}
    for choice in stream.choices(index):
        delta = choice["delta"]
        if delta.get("content") is not None:
            message["content"] = (message["content"] or "") + delta["content"]
        message["reasoning"] += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["calls"]):
                assert set(call) == {"index", "id", "type", "function"}
                assert call["function"]["arguments"] == ""
                message["calls"].append([call["function"]["name"], ""])
            else:
                assert set(call) == {"index", "function"}
                assert call["index"] == len(message["calls"]) - 1
                message["calls"][-1][1] += call["function"]["arguments"]
    return message


async def test_calls_in_a_whole_answer() -> None:
    async with answering(TWO_CALLS) as running:
        (choice,) = await whole(running)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Sure."
    assert [(call["type"], call["function"]) for call in message["tool_calls"]] == [
        ("function", {"name": "get_weather", "arguments": ARGUMENTS}),
        ("function", {"name": "now", "arguments": "{}"}),
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", call_id) for call_id in ids)
    assert "reasoning" not in message


async def test_calls_in_a_streamed_answer() -> None:
    async with answering(TWO_CALLS) as running:
        stream = await streamed(running)
    assert joined(stream) == {
        "content": "Sure.",
        "reasoning": "",
        "calls": [["get_weather", ARGUMENTS], ["now", "{}"]],
        "finish": ["tool_calls"],
    }
    pieces = [call for choice in stream.choices(0) for call in choice["delta"].get("tool_calls", [])]
    assert len(pieces) > 20, "arguments are told as they come"
    assert stream.choices(0)[0]["delta"] == {"role": "assistant", "content": None}


async def test_content_is_null_where_there_are_only_calls() -> None:
    only = TWO_CALLS.removeprefix("Sure.\n")
    async with answering(only) as running:
        (choice,) = await whole(running)
        assert choice["message"]["content"] is None
        assert joined(await streamed(running))["content"] is None


async def test_choices_are_read_each_by_itself() -> None:
    async with answering(TWO_CALLS, "No tool is needed.", "<tool_call>{") as running:
        stream = await streamed(running, n=3)
        choices = await whole(running, n=3)
    reasons = ["tool_calls", "stop", "stop"]
    assert [choice["finish_reason"] for choice in choices] == reasons
    assert [joined(stream, index)["finish"] for index in range(3)] == [[reason] for reason in reasons]
    contents = ["Sure.", "No tool is needed.", "<tool_call>{"]
    assert [choice["message"]["content"] for choice in choices] == contents
    assert [joined(stream, index)["content"] for index in range(3)] == contents
    assert "tool_calls" not in choices[1]["message"]


async def test_without_parallel_calls_the_answer_ends_with_the_first_one() -> None:
    async with answering(TWO_CALLS + " Bye") as running:
        (choice,) = await whole(running, parallel_tool_calls=False)
        message = joined(await streamed(running, parallel_tool_calls=False))
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert message == {
        "content": "Sure.",
        "reasoning": "",
        "calls": [["get_weather", ARGUMENTS]],
        "finish": ["tool_calls"],
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_calls_the_worker_stops_behind_the_first_one(stream: bool) -> None:
    async def without_end(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        while True:
            await tokens(connection, submit, TWO_CALLS.encode(), finish=False)

    worker = FakeWorker(byte_card(template=HERMES), behaviour=without_end)
    async with running_gateway(worker) as running:
        if stream:
            message = joined(await streamed(running, parallel_tool_calls=False, n=2))
            assert (message["calls"], message["finish"]) == ([["get_weather", ARGUMENTS]], ["tool_calls"])
        else:
            choices = await whole(running, parallel_tool_calls=False, n=2)
            assert [len(choice["message"]["tool_calls"]) for choice in choices] == [1, 1]
            assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "tool_calls"]
        await worker.until(lambda: len(worker.cancelled) == 2 and not worker.running)
        assert running.at_rest


async def test_an_answer_that_is_cut_says_so_and_is_the_same_streamed_and_whole() -> None:
    async with answering(TWO_CALLS) as running:
        for length in range(1, len(TWO_CALLS.encode()), 12):
            (choice,) = await whole(running, max_tokens=length)
            message = joined(await streamed(running, max_tokens=length))
            assert choice["finish_reason"] == "length"
            assert message["finish"] == ["length"]
            assert message["content"] == choice["message"]["content"]
            calls = choice["message"].get("tool_calls", [])
            assert message["calls"] == [[call["function"]["name"], call["function"]["arguments"]] for call in calls]


@pytest.mark.parametrize("changes", [{"tools": None}, {"tools": []}, {"tool_choice": "none"}])
async def test_without_tools_nothing_is_taken_for_a_call(changes: dict[str, Any]) -> None:
    async with answering(TWO_CALLS) as running:
        (choice,) = await whole(running, **changes)
        stream = await streamed(running, **changes)
    assert (choice["message"]["content"], choice["finish_reason"]) == (TWO_CALLS, "stop")
    assert stream.text() == TWO_CALLS


async def test_reasoning_is_told_apart() -> None:
    async with answering("<think>\nIt rains.\n</think>\n\nTake an umbrella.", template=THINKS) as running:
        (choice,) = await whole(running, tools=None)
        message = joined(await streamed(running, tools=None))
        (without,) = await whole(running, tools=None, include_reasoning=False)
    assert choice["message"] == {
        "role": "assistant",
        "content": "Take an umbrella.",
        "refusal": None,
        "reasoning": "It rains.",
        "reasoning_content": "It rains.",
    }
    assert message == {"content": "Take an umbrella.", "reasoning": "It rains.", "calls": [], "finish": ["stop"]}
    assert without["message"] == {"role": "assistant", "content": "Take an umbrella.", "refusal": None}


async def test_reasoning_that_the_prompt_opened_and_a_call_after_it() -> None:
    async with answering(f"I call.\n</think>\n\n{TWO_CALLS}", template=THINKING) as running:
        (choice,) = await whole(running)
        message = joined(await streamed(running))
        (plain,) = await whole(running, add_generation_prompt=False)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("I call.", "Sure.")
    assert (message["reasoning"], message["content"], len(message["calls"])) == ("I call.", "Sure.", 2)
    assert "reasoning" not in plain["message"], "the prompt did not open it"


async def test_reasoning_goes_on_in_the_last_message() -> None:
    async with answering(" and on.\n</think>\n\nYes.", template=THINKS) as running:
        for begun, reasoned in (("<think>\nOn", True), ("<think>\nOn</think>", False), ("Well", False)):
            messages = [*MESSAGES, {"role": "assistant", "content": begun}]
            changes = {"continue_final_message": True, "add_generation_prompt": False, "tools": None}
            (choice,) = await whole(running, messages=messages, **changes)
            assert choice["message"].get("reasoning") == (" and on." if reasoned else None)


async def test_logprobs_are_those_of_all_tokens_as_they_came() -> None:
    async with answering(TWO_CALLS) as running:
        (choice,) = await whole(running, logprobs=True, top_logprobs=1)
        stream = await streamed(running, logprobs=True, top_logprobs=1)
    expected = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert len(expected) == len(TWO_CALLS.encode())
    told = [entry for chunk in stream.choices(0) if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert [entry["token"] for entry in told] == expected


async def test_parsers_can_be_chosen_and_switched_off() -> None:
    text = f"<think>a</think>{TWO_CALLS}"
    async with answering(text, template=PLAIN, tool_parser="hermes", reasoning_parser="think") as running:
        (choice,) = await whole(running)
        assert choice["message"]["reasoning"] == "a"
        assert len(choice["message"]["tool_calls"]) == 2
    async with answering(text, template=THINKING, tool_parser="none", reasoning_parser="none") as running:
        (choice,) = await whole(running)
        assert choice["message"]["content"] == text


def test_the_options_name_all_parsers() -> None:
    fields = GatewayOptions.__dataclass_fields__
    assert fields["tool_parser"].metadata["choices"] == TOOL_PARSERS
    assert fields["reasoning_parser"].metadata["choices"] == REASONING_PARSERS


async def test_a_model_without_a_place_for_tools_says_so() -> None:
    async with answering("hi", template="{% for m in messages %}{{ m.content }}{% endfor %}") as running:
        response = await running.client.post("/v1/chat/completions", json=BODY)
        assert (response.status_code, response.headers["x-antiphon-ignored"]) == (200, "tools")
        response = await running.client.post("/v1/chat/completions", json={**BODY, "tool_choice": "required"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
        assert (await whole(running, tool_choice="none"))[0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom", "custom": {"name": "x"}}, "tools[1].type"),
        ({"type": "function"}, "tools[1].function"),
        ({"type": "function", "function": {"name": "a b"}}, "tools[1].function.name"),
        ({"type": "function", "function": {"name": "f", "parameters": [1]}}, "tools[1].function.parameters"),
    ],
)
async def test_tools_that_are_none_are_named(tool: dict[str, Any], param: str) -> None:
    async with answering("hi") as running:
        response = await running.client.post("/v1/chat/completions", json={**BODY, "tools": [TOOLS[0], tool]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("template", [PLAIN, PLAIN + "{# <tool_call><function= #}"])
async def test_a_call_is_not_forced_where_its_form_is_not_known(template: str) -> None:
    async with answering("hi", template=template) as running:
        response = await running.client.post("/v1/chat/completions", json={**BODY, "tool_choice": "required"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")
        assert (await whole(running))[0]["finish_reason"] == "stop"


# -- marks that are special tokens


def _special_card(marks: list[str], template: str) -> pb.ModelCard:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(marks)
    card = byte_card(template=template)
    card.tokenizer_json = tokenizer.to_str().encode()
    card.vocab_size = tokenizer.get_vocab_size()
    card.digest = hashlib.sha256(card.tokenizer_json + template.encode()).hexdigest()
    return card


async def _as_workers_do(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
    """Answers what the prompt asks to repeat, detokenised as a worker does it, <|im_start|> scattered in."""
    connection.accept(submit.ref)
    tokenizer = Tokenizer.from_buffer(worker.card.tokenizer_json)
    prompt = tokenizer.decode(list(submit.prompt_token_ids), skip_special_tokens=False)
    wanted = prompt.rpartition("Repeat exactly: ")[2].split("<|im_end|>")[0]
    detokenizer = Detokenizer(
        tokenizer,
        special_token_ids(tokenizer),
        skip_special_tokens=submit.sampling.skip_special_tokens,
        kept_special_ids=submit.sampling.kept_special_ids,
    )
    ids = tokenizer.encode(wanted, add_special_tokens=False).ids
    for token_id in ids:
        noise = tokenizer.token_to_id("<|im_start|>")
        connection.step(
            submit.ref, token_ids=[token_id, noise], text=detokenizer.push(token_id) + detokenizer.push(noise)
        )
    connection.step(submit.ref, text=detokenizer.flush(), finish=pb.FINISH_STOP, usage=pb.Usage(completion_tokens=1))


@pytest.mark.parametrize(
    ("marks", "template", "text"),
    [
        (["<tool_call>", "</tool_call>"], HERMES, TWO_CALLS),
        (
            ["[TOOL_CALLS]", "[ARGS]"],
            MISTRAL,
            f"Sure.[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}",
        ),
        (["<think>", "</think>", "<tool_call>"], HERMES + "{# <think> #}", f"<think>I call.</think>{TWO_CALLS}"),
    ],
)
async def test_marks_that_are_special_tokens_are_seen_and_no_other_one_is(
    marks: list[str], template: str, text: str
) -> None:
    worker = FakeWorker(_special_card(marks, template), behaviour=_as_workers_do)
    async with running_gateway(worker) as running:
        messages = [{"role": "user", "content": f"Repeat exactly: {text}"}]
        (choice,) = await whole(running, messages=messages)
        message = joined(await streamed(running, messages=messages))
        (without,) = await whole(running, messages=messages, tools=None)
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in choice["message"]["tool_calls"]]
    assert calls == message["calls"] == [["get_weather", ARGUMENTS], ["now", "{}"]]
    assert choice["message"]["content"] == message["content"] == "Sure."
    assert message["reasoning"] == ("I call." if "<think>" in marks else "")
    assert "<tool_call>" not in without["message"]["content"]
    assert "[TOOL_CALLS]" not in without["message"]["content"]
    if template == MISTRAL:
        assert all(re.fullmatch(r"[A-Za-z0-9]{9}", call["id"]) for call in choice["message"]["tool_calls"])


# -- a client that people use


class GetWeather(pydantic.BaseModel):
    city: str
    days: int


async def test_the_openai_clients_streaming_helper() -> None:
    messages: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "What will the weather be?"}]
    text = f'<tool_call>\n{{"name": "GetWeather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    async with (
        answering(text) as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        tools = [openai.pydantic_function_tool(GetWeather)]
        deltas: list[str] = []
        async with client.chat.completions.stream(model="test-model", messages=messages, tools=tools) as stream:
            async for event in stream:
                if event.type == "tool_calls.function.arguments.delta":
                    deltas.append(event.arguments_delta)
            final = await stream.get_final_completion()
        parsed = await client.chat.completions.parse(model="test-model", messages=messages, tools=tools)
    assert "".join(deltas) == ARGUMENTS
    for completion in (final, parsed):
        (choice,) = completion.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.function.parsed_arguments == GetWeather(**json.loads(ARGUMENTS))
