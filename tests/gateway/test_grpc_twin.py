"""The same request over HTTP and over gRPC is the same answer: to a scripted worker, and to real worker processes."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from antiphon_gateway.parameters import PARAMETERS, Endpoint, Standing
from antiphon_gateway.schema import ChatBody, CommonBody, CompletionBody, StreamOptions, StructuredOutputs
from antiphon_proto import inference_pb2 as api
from antiphon_proto import worker_pb2 as pb

from tests.gateway.test_chat_tools import HERMES, THINKING, TOOLS, TWO_CALLS, saying
from tests.support.fake_worker import FakeWorker, byte_card, byte_tokenizer
from tests.support.gateway import RunningGateway, eventually, running_gateway
from tests.support.grpc_calls import RunningFront, as_json, front_of, message_of, running_front, without
from tests.support.openai_cases import parse_stream
from tests.support.workers import Workers

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "What will the weather be?"}]
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer", "maximum": 9007199254740993}, "a": {"const": 1}}}

CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 2**63 - 1},
    "seed with the highest bit": {"seed": -1, "n": 2},
    "zeros": {"temperature": 0, "top_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "seed": 0, "priority": 0},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "min_tokens": 2},
    "bias": {"logit_bias": {"65": 5, "66": -100.0}},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "n": 2},
    "stops": {"stop": ["zz", "\u00e9"], "stop_token_ids": [5], "include_stop_str_in_output": True},
    "one stop": {"stop": "zz"},
    "switches": {"ignore_eos": True, "skip_special_tokens": False, "parallel_tool_calls": True},
    "tier": {"service_tier": "flex", "priority": -1, "max_completion_tokens": 5},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    "json": {"response_format": {"type": "json_object"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "guided": {"guided_regex": "[a-f]{1,4}"},
    "guided schema": {"guided_json": SCHEMA},
    "kwargs": {"chat_template_kwargs": {"big": 2**53 + 1, "float": 1.0, "z": None, "a": [True]}},
    "continued": {
        "messages": [*USER, {"role": "assistant", "content": "It will"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "a long talk": {
        "messages": [
            {
                "role": "developer",
                "content": [{"type": "text", "text": "Be "}, {"type": "refusal", "refusal": "brief"}],
            },
            {"role": "user", "content": '\u0000 "\\ \u2028 \U0001f600', "name": "Ann"},
            {
                "role": "assistant",
                "content": None,
                "reasoning": "I wonder.",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"b": 1.0, "a": 2}'}},
                    {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "12:00", "colour": {"deep": [1, 2.0]}},
        ]
    },
    "allowed": {"allowed_token_ids": [65, 66, 67], "bad_words": ["hell", "you"]},
    "cut": {"truncate_prompt_tokens": 9, "truncation_side": "right", "add_special_tokens": True},
    "ids": {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": True},
    "prompt scores": {"prompt_logprobs": 2},
    "a cache of its own": {"cache_salt": "mine", "spaces_between_special_tokens": True},
    "documents": {"documents": [{"title": "T", "text": "b", "year": 1.0}, {"a": 2**60}]},
    "an echo": {
        "messages": [*USER, {"role": "assistant", "content": "It will"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
    },
    "ignored": {"foo": 1, "user": "u", "metadata": {"a": "b"}},
}
COMPLETIONS_ASKED: dict[str, dict[str, Any]] = {
    "text": {"prompt": "hello"},
    "ids": {"prompt": [72, 69, 76]},
    "texts": {"prompt": ["hello", "you"], "n": 2},
    "lists of ids": {"prompt": [[72, 69], [76]]},
    "echo": {"prompt": "hello", "echo": True},
    "logprobs": {"prompt": "hello", "logprobs": 3},
    "logprobs of the chosen": {"prompt": "hello", "logprobs": 0},
    "nothing to make": {"prompt": "hello", "max_tokens": 0, "echo": True},
    "no maximum": {"prompt": "hello", "max_tokens": None},
    "ids and scores": {
        "prompt": ["hello", "you"],
        "return_token_ids": True,
        "prompt_logprobs": 1,
        "truncate_prompt_tokens": 3,
        "add_special_tokens": False,
    },
    "echo with logprobs": {"prompt": "hello", "echo": True, "logprobs": 2},
    "grammar": {"prompt": "hello", "guided_grammar": 'start: "a" | "b"'},
}
UNLIKE = ("id", "created", "object")


def told_by_http(answer: dict[str, Any]) -> dict[str, Any]:
    """Of the two ways to say a thing, the one that gRPC has; log-probabilities of completions by token."""
    answer = without(copy.deepcopy(answer), *UNLIKE)
    of_prompt = ("prompt_logprobs", "prompt_token_ids")
    is_chat = not any("text" in choice for choice in answer["choices"])
    for holder in [answer] if is_chat else answer["choices"]:
        holder.update({name: holder.get(name, []) for name in of_prompt})
        holder["prompt_logprobs"] = [
            {"candidates": [{"token_id": int(token_id), **told} for token_id, told in (entry or {}).items()]}
            for entry in holder["prompt_logprobs"]
        ]
    for choice in answer["choices"]:
        choice.setdefault("token_ids", [])
        for name in ("message", "delta"):
            if name in choice:
                choice[name] = _said(choice[name])
        logprobs = choice.get("logprobs")
        if logprobs is not None and "content" in logprobs:
            logprobs.pop("refusal")
        elif logprobs is not None:
            names = ("tokens", "token_logprobs", "text_offset", "top_logprobs")
            choice["logprobs"] = [
                {
                    "token": token,
                    "logprob": logprob,
                    "text_offset": offset,
                    "top_logprobs": [{"token": other, "logprob": value} for other, value in (top or {}).items()],
                }
                for token, logprob, offset, top in zip(*(logprobs[name] for name in names), strict=True)
            ]
        elif "text" in choice:
            choice["logprobs"] = []
    answer.setdefault("usage", None)
    if answer["usage"] is not None:
        answer["usage"].setdefault("completion_tokens_details", None)
    return answer


def _said(message: dict[str, Any]) -> dict[str, Any]:
    message = {"content": None, "reasoning": None, "role": None, "tool_calls": []} | without(
        message, "refusal", "reasoning_content"
    )
    for call in message["tool_calls"]:
        call.pop("id", None)
    return message


def told_by_grpc(answer: Any) -> dict[str, Any]:
    made = without(as_json(answer), *UNLIKE)
    for choice in made["choices"]:
        for name in ("message", "delta"):
            for call in choice.get(name, {}).get("tool_calls", ()):
                call.pop("id", None)
    return made


async def check_twins(front: RunningFront, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Whole and streamed, by both ways; what was told, whole."""
    kind = api.ChatCompletionRequest if path == CHAT else api.CompletionRequest
    stub = front.stub
    whole, streaming = (
        (stub.ChatCompletion, stub.StreamChatCompletion) if path == CHAT else (stub.Completion, stub.StreamCompletion)
    )
    response = await front.running.client.post(path, json=body)
    assert response.status_code == 200, response.text
    call = whole(message_of(kind, body))
    http, grpc = told_by_http(response.json()), told_by_grpc(await call)
    for answer in (http, grpc):
        # The prompt of the second one is in the cache.
        answer["usage"].pop("prompt_tokens_details")
    assert grpc == http
    ignored = dict(await call.initial_metadata()).get("x-antiphon-ignored")
    assert ignored == response.headers.get("x-antiphon-ignored")

    streamed = {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    http_stream = parse_stream((await front.running.client.post(path, json={**streamed, "stream": True})).content)
    chunks = [told_by_grpc(chunk) async for chunk in streaming(message_of(kind, streamed))]
    assert together(chunks) == together([told_by_http(event) for event in http_stream.events])
    assert together(chunks)["texts"] == {
        choice["index"]: choice["message"]["content"] or "" if path == CHAT else choice["text"]
        for choice in grpc["choices"]
    }
    assert together(chunks)["finish"] == {choice["index"]: choice["finish_reason"] for choice in grpc["choices"]}
    return list(grpc["choices"])


def together(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream's chunks added up, as they may be cut in different places."""
    made: dict[str, Any] = {"texts": {}, "reasoning": {}, "calls": {}, "logprobs": {}, "finish": {}, "ids": {}}
    for chunk in chunks:
        for holder in (chunk, *chunk["choices"]):
            for name in ("token_ids", "prompt_token_ids", "prompt_logprobs"):
                if holder.get(name):
                    made["ids"].setdefault((name, holder.get("index")), []).extend(holder[name])
        made["model"] = chunk["model"]
        if chunk["usage"] is not None:
            made["usage"] = without(chunk["usage"], "prompt_tokens_details")
        for choice in chunk["choices"]:
            index, said = choice["index"], choice.get("delta") or {"content": choice.get("text")}
            made["texts"][index] = made["texts"].get(index, "") + (said["content"] or "")
            made["reasoning"][index] = made["reasoning"].get(index, "") + (said.get("reasoning") or "")
            for call in said.get("tool_calls", ()):
                known = made["calls"].setdefault((index, call["index"]), ["", ""])
                known[0] += call["function"].get("name") or ""
                known[1] += call["function"]["arguments"]
            told = choice["logprobs"] or []
            made["logprobs"].setdefault(index, []).extend(told["content"] if isinstance(told, dict) else told)
            if choice["finish_reason"]:
                made["finish"][index] = choice["finish_reason"]
    return made


# ------------------------------------------------------------------ a scripted worker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> FakeWorker:
    return FakeWorker()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(worker: FakeWorker) -> AsyncIterator[RunningFront]:
    async with running_front(worker) as front:
        yield front


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CHATS)
async def test_a_chat_is_the_same(worker: FakeWorker, front: RunningFront, name: str) -> None:
    """Also what the worker is given is: every parameter arrives."""
    worker.submits.clear()
    await check_twins(front, CHAT, {"model": "test-model", "messages": USER, "max_tokens": 8, "seed": 5, **CHATS[name]})
    check_submits(worker, 4)
    await eventually(lambda: front.running.at_rest)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", COMPLETIONS_ASKED)
async def test_a_completion_is_the_same(worker: FakeWorker, front: RunningFront, name: str) -> None:
    worker.submits.clear()
    body = {"model": "test-model", "max_tokens": 8, "seed": 5, **COMPLETIONS_ASKED[name]}
    await check_twins(front, COMPLETIONS, body)
    if body["max_tokens"] != 0:
        check_submits(worker, 4)
    await eventually(lambda: front.running.at_rest)


def check_submits(worker: FakeWorker, times: int) -> None:
    """The same was submitted so many times, in turn."""
    given = []
    for submit in worker.submits:
        own = pb.Submit()
        own.CopyFrom(submit)
        own.ClearField("ref")
        own.ClearField("request_id")
        own.ClearField("traceparent")
        own.ClearField("prefill")
        given.append((list(own.prompt_token_ids), own.sampling.SerializeToString(deterministic=True)))
    worker.submits.clear()
    assert len(given) % times == 0
    one = len(given) // times
    for start in range(one, len(given), one):
        assert sorted(given[start : start + one]) == sorted(given[:one])


@pytest.mark.parametrize("answer", [TWO_CALLS, "<think>\nI wonder.\n</think>\nWell.", "Just text."])
@pytest.mark.parametrize("template", [HERMES, THINKING])
async def test_calls_and_reasoning_are_the_same(answer: str, template: str) -> None:
    tools = copy.deepcopy(TOOLS)
    tools[0]["function"] = {"name": "get_weather", "description": "Look out of the window.", "parameters": SCHEMA}
    tools[1]["function"]["strict"] = False
    body = {"model": "test-model", "messages": USER, "tools": tools, "seed": 1}
    worker = FakeWorker(byte_card(template=template), behaviour=saying(answer))
    async with running_front(worker) as front:
        for changes in ({"include_reasoning": False, "parallel_tool_calls": False}, {}):
            choices = await check_twins(front, CHAT, {**body, **changes})
            check_submits(worker, 4)
        if answer is TWO_CALLS and template is HERMES:
            assert [call["function"]["name"] for call in choices[0]["message"]["tool_calls"]] == ["get_weather", "now"]
            assert choices[0]["finish_reason"] == "tool_calls"


async def test_a_tool_that_has_to_be_called_is_named() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    worker = FakeWorker(byte_card(template=HERMES), behaviour=saying(call))
    async with running_front(worker) as front:
        body = {"model": "test-model", "messages": USER, "tools": TOOLS, "seed": 1}
        for choice in ("required", {"type": "function", "function": {"name": "now"}}):
            await check_twins(front, CHAT, {**body, "tool_choice": choice})
            assert worker.submits[-1].sampling.HasField("grammar")
            check_submits(worker, 4)


async def test_tools_and_messages_reach_the_template_in_their_own_order() -> None:
    """Whole numbers stay whole, and keys where they were."""
    worker = FakeWorker()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 1.0, "big": 2**70}}}
    async with running_front(worker) as front:
        body = {"model": "test-model", "messages": USER, "tools": [tool], "max_tokens": 1}
        await front.stub.ChatCompletion(message_of(api.ChatCompletionRequest, body))
        prompt = str(byte_tokenizer().decode(list(worker.submits[-1].prompt_token_ids), skip_special_tokens=False))
        assert f'"parameters": {{"z": 1, "a": 1.0, "big": {2**70}}}' in prompt
        assert prompt.index('"type"') < prompt.index('"function"') < prompt.index('"name"')


@pytest.mark.asyncio(loop_scope="module")
async def test_tokens_and_models_are_the_same(front: RunningFront) -> None:
    client, stub = front.running.client, front.stub
    models = (await client.get("/v1/models")).json()["data"]
    assert [as_json(model) for model in (await stub.ListModels(api.ListModelsRequest())).data] == [
        without(model, "object") for model in models
    ]
    assert as_json(await stub.GetModel(api.GetModelRequest(model="test-model"))) == without(models[0], "object")
    for body in (
        {"prompt": "hello", "return_token_strs": True},
        {"prompt": "", "add_special_tokens": False},
        {"messages": USER, "tools": TOOLS, "add_generation_prompt": False},
    ):
        asked = {"model": "test-model", **body}
        http = (await client.post("/tokenize", json=asked)).json()
        message = message_of(api.TokenizeRequest, asked)
        told = as_json(await stub.Tokenize(message))
        assert told == http | {"token_strs": http["token_strs"] or []}
        assert as_json(await stub.CountTokens(message)) == without(http, "tokens", "token_strs")
        back = await stub.Detokenize(api.DetokenizeRequest(model="test-model", tokens=http["tokens"]))
        assert (
            as_json(back)
            == (await client.post("/detokenize", json={"model": "test-model", "tokens": http["tokens"]})).json()
        )


# ------------------------------------------------------------------ nothing of HTTP's is missing


@pytest.mark.parametrize("endpoint", Endpoint)
def test_every_honoured_parameter_has_a_field(endpoint: Endpoint) -> None:
    """Who gives HTTP a parameter gives it to gRPC too (proto/antiphon_proto/inference.proto)."""
    kind = api.ChatCompletionRequest if endpoint is Endpoint.CHAT else api.CompletionRequest
    honoured = {row.name for row in PARAMETERS if endpoint in row.endpoints and row.standing is Standing.HONOURED}
    # The method says whether it is streamed.
    fields = set(kind.DESCRIPTOR.fields_by_name) - {"extra"}
    assert fields == honoured - {"stream"}


@pytest.mark.parametrize(
    ("record", "message", "refused"),
    [
        (StreamOptions, api.StreamOptions, set()),
        (
            StructuredOutputs,
            api.StructuredOutputs,
            {"structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"},
        ),
    ],
)
def test_options_have_the_fields_that_http_s_have(record: Any, message: Any, refused: set[str]) -> None:
    assert set(message.DESCRIPTOR.fields_by_name) == set(record.__struct_fields__) - refused


def test_the_fields_that_both_requests_have_are_the_same() -> None:
    chat, completion = (kind.DESCRIPTOR for kind in (api.ChatCompletionRequest, api.CompletionRequest))
    common = set(CommonBody.__struct_fields__) - {"stream"}
    assert common <= set(ChatBody.__struct_fields__) & set(CompletionBody.__struct_fields__)
    for name in common - {"model"}:
        one, other = chat.fields_by_name[name], completion.fields_by_name[name]
        assert (one.number, one.type, one.is_repeated) == (other.number, other.type, other.is_repeated)
        if name != "logit_bias":
            # A map's entry is of its message.
            assert one.message_type == other.message_type


# ------------------------------------------------------------------ real workers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningFront]:
    folder: Path = tmp_path_factory.mktemp("workers")
    async with Workers(folder) as started:
        workers = await started.start_all(("--role", "decode"), ("--role", "prefill"))
        gateway: RunningGateway
        async with running_gateway(worker=tuple(worker.ready.address for worker in workers)) as gateway:
            await eventually(lambda: len(gateway.gateway.fleet.workers()) == 2)
            async with front_of(gateway) as front:
                yield front


@pytest.mark.asyncio(loop_scope="module")
async def test_real_workers_answer_the_same(real: RunningFront) -> None:
    (model,) = real.running.gateway.models
    messages = [{"role": "user", "content": "Tell me of a harbour at the length of some blocks. " * 30}]
    for changes in (
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"response_format": CHATS["schema"]["response_format"], "max_tokens": 200},
        {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.2},
    ):
        body = {"model": model.name, "messages": messages, "max_tokens": 24, "seed": 11, **changes}
        await check_twins(real, CHAT, body)
    await check_twins(
        real, COMPLETIONS, {"model": model.name, "prompt": ["One", "Two"], "max_tokens": 12, "seed": 3, "logprobs": 2}
    )
    await eventually(lambda: real.running.at_rest)
