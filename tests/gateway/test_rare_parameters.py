"""Parameters that few requests have: honoured, refused by name, or told of in a header."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from antiphon_gateway.parameters import (
    MAX_HEADER_BYTES,
    MAX_NAMES,
    PARAMETERS,
    Endpoint,
    Standing,
    ignored_header,
    rare,
    wide,
)
from antiphon_gateway.schema import ChatBody, CompletionBody
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import FakeWorker, byte_card, byte_tokenizer
from tests.support.gateway import RunningGateway, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"model": "test-model", "prompt": "hello", "max_tokens": 2}
BODIES = {Endpoint.CHAT: (ChatBody, CHAT), Endpoint.COMPLETIONS: (CompletionBody, COMPLETION)}
IGNORED = "x-antiphon-ignored"


def thinking_card(name: str, template: str) -> pb.ModelCard:
    return byte_card(name, template=template + byte_card().chat_template)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> FakeWorker:
    return FakeWorker()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(worker: FakeWorker) -> AsyncIterator[RunningGateway]:
    others = [
        FakeWorker(thinking_card("by-name", "{{ reasoning_effort }}:"), worker_id="w1"),
        FakeWorker(thinking_card("by-switch", "{{ enable_thinking }}:"), worker_id="w2"),
    ]
    async with running_gateway(worker, *others) as gateway:
        yield gateway


def prompt_of(worker: FakeWorker) -> str:
    return str(byte_tokenizer().decode(list(worker.submits[-1].prompt_token_ids), skip_special_tokens=False))


def refused() -> list[tuple[Endpoint, str]]:
    return [
        (endpoint, row.name)
        for endpoint, (kind, _) in BODIES.items()
        for row in rare(endpoint, kind.__struct_fields__)
        if row.standing is Standing.REFUSED
    ]


async def test_every_field_of_the_bodies_is_in_the_table_once() -> None:
    for endpoint, (kind, _) in BODIES.items():
        names = [row.name for row in PARAMETERS if endpoint in row.endpoints]
        assert len(names) == len(set(names))
        assert set(kind.__struct_fields__) <= set(names)


async def test_what_is_honoured_is_a_field_or_has_a_type_in_the_table() -> None:
    for endpoint, (kind, _) in BODIES.items():
        for row in rare(endpoint, kind.__struct_fields__):
            assert (row.form is not None) is (row.standing is Standing.HONOURED), row.name
            if row.form is not None:
                assert getattr(kind, row.name) is None, "a plain body says that it has none"


@pytest.mark.parametrize(("endpoint", "name"), refused())
async def test_what_cannot_be_is_refused_by_name(running: RunningGateway, endpoint: Endpoint, name: str) -> None:
    response = await running.client.post(endpoint.value, json={**BODIES[endpoint][1], name: "anything"})
    assert response.status_code == 400
    assert (response.json()["error"]["param"], response.json()["error"]["code"]) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("endpoint", "extra"),
    [
        (Endpoint.CHAT, {"functions": [{"name": "f"}]}),
        (Endpoint.CHAT, {"audio": {"voice": "alloy"}}),
        (Endpoint.CHAT, {"modalities": ["audio"]}),
        (Endpoint.CHAT, {"best_of": 2}),
        (Endpoint.COMPLETIONS, {"best_of": 2}),
        (Endpoint.COMPLETIONS, {"suffix": "the end"}),
    ],
)
async def test_a_refusal_says_what_the_table_says(
    running: RunningGateway, endpoint: Endpoint, extra: dict[str, Any]
) -> None:
    [name] = extra
    [row] = [row for row in PARAMETERS if row.name == name and endpoint in row.endpoints]
    response = await running.client.post(endpoint.value, json={**BODIES[endpoint][1], **extra})
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith(row.sentence)


@pytest.mark.parametrize("endpoint", BODIES)
async def test_what_asks_for_nothing_is_accepted_and_needs_no_header(
    running: RunningGateway, endpoint: Endpoint
) -> None:
    kind, body = BODIES[endpoint]
    extra = {row.name: row.harmless[0] for row in rare(endpoint, kind.__struct_fields__) if row.harmless}
    extra |= {row.name: None for row in rare(endpoint, kind.__struct_fields__) if not row.harmless}
    extra |= {row.name: "x" for row in PARAMETERS if row.standing is Standing.WITHOUT_EFFECT}
    if endpoint is Endpoint.COMPLETIONS:
        extra = {name: value for name, value in extra.items() if name in wide(kind).__struct_fields__}
    assert len(extra) > 20
    response = await running.client.post(endpoint.value, json={**body, **extra, "foo": None})
    assert response.status_code == 200, response.text
    assert IGNORED not in response.headers


@pytest.mark.parametrize("endpoint", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_named_in_a_header(running: RunningGateway, endpoint: Endpoint, stream: bool) -> None:
    body = {**BODIES[endpoint][1], "stream": stream, "foo": [1], "bar": {"model": 2}, "user": "u"}
    if stream:
        body["stream_options"] = {"include_usage": True, "sparkle": 1, "include_obfuscation": False}
    response = await running.client.post(endpoint.value, json=body)
    assert response.status_code == 200, response.text
    assert response.headers[IGNORED] == "foo, bar, stream_options.sparkle"[: None if stream else 8]
    assert ('"usage":{"prompt' in response.text) is True
    plain = await running.client.post(endpoint.value, json=BODIES[endpoint][1])
    assert IGNORED not in plain.headers


async def test_a_fault_beside_an_unknown_field_is_found(running: RunningGateway) -> None:
    response = await running.client.post(Endpoint.CHAT.value, json={"foo": 1, **CHAT, "temperature": "hot"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "temperature")
    response = await running.client.post(Endpoint.CHAT.value, content=b'{"foo": 1, "model": "test-model", ')
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    spoilt = msgspec.json.encode({**CHAT, "foo": 1}).replace(b"foo", b"fo\xff")
    response = await running.client.post(Endpoint.CHAT.value, content=spoilt)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    marked = b"\xef\xbb\xbf" + msgspec.json.encode({**CHAT, "foo": 1})
    assert (await running.client.post(Endpoint.CHAT.value, content=marked)).headers[IGNORED] == "foo"


async def test_obfuscation_of_streams_is_refused(running: RunningGateway) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_obfuscation": True}}
    response = await running.client.post(Endpoint.CHAT.value, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options.include_obfuscation")


async def test_the_header_is_bounded_and_can_always_be_sent(running: RunningGateway) -> None:
    name, value = ignored_header(tuple(f"field{number}" for number in range(MAX_NAMES + 1)))
    assert (name, value.count(b", "), value[-4:]) == (IGNORED.encode(), MAX_NAMES, b" ...")
    assert ignored_header(("a b", "c,d", "\n", "é", "", "ok"))[1] == b"ok, ..."
    assert len(ignored_header(("x" * 400, "y" * 400, "z" * 100))[1]) <= MAX_HEADER_BYTES
    response = await running.client.post(Endpoint.CHAT.value, json={**CHAT, "a\r\nx-evil: 1": 1})
    assert (response.status_code, response.headers[IGNORED]) == (200, "...")


@pytest.mark.parametrize(
    ("model", "effort", "seen"),
    [("by-name", "low", "low:"), ("by-switch", "low", "True:"), ("by-switch", "none", "False:")],
)
async def test_reasoning_effort_reaches_the_template(
    running: RunningGateway, model: str, effort: str, seen: str
) -> None:
    body = {**CHAT, "model": model, "reasoning_effort": effort}
    response = await running.client.post("/tokenize", json={**body, "return_token_strs": True})
    assert "".join(response.json()["token_strs"]).startswith(seen)
    answer = await running.client.post(Endpoint.CHAT.value, json=body)
    assert (answer.status_code, IGNORED in answer.headers) == (200, False)


async def test_reasoning_effort_that_the_template_does_not_know_is_told(running: RunningGateway) -> None:
    response = await running.client.post(Endpoint.CHAT.value, json={**CHAT, "reasoning_effort": "low"})
    assert (response.status_code, response.headers[IGNORED]) == (200, "reasoning_effort")
    response = await running.client.post(Endpoint.CHAT.value, json={**CHAT, "reasoning_effort": "heroic"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "reasoning_effort")


@pytest.mark.parametrize("content", ["Once upon", "Once upon \n", [{"type": "text", "text": "Once upon"}]])
async def test_the_last_message_is_gone_on_with(running: RunningGateway, worker: FakeWorker, content: Any) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": content}]
    body = {**CHAT, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert (await running.client.post(Endpoint.CHAT.value, json=body)).status_code == 200
    assert prompt_of(worker) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nOnce upon"


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": CHAT["messages"]},
        {"messages": [{"role": "assistant", "content": " "}]},
        {"messages": [{"role": "assistant", "content": None}]},
        {"messages": [{"role": "assistant", "content": "x"}], "add_generation_prompt": True},
    ],
)
async def test_a_message_that_cannot_be_gone_on_with_is_refused(
    running: RunningGateway, changes: dict[str, Any]
) -> None:
    response = await running.client.post(Endpoint.CHAT.value, json={**CHAT, "continue_final_message": True, **changes})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "continue_final_message")
