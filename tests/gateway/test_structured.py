"""What a request says its answer has to be: read, compiled at the gateway, and sent with each choice; or refused with
a sentence before any worker hears of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from antiphon_gateway import grammar_checks
from antiphon_proto import grammars
from antiphon_proto import worker_pb2 as pb

from tests.support.fake_worker import TEMPLATE, FakeWorker, byte_card
from tests.support.gateway import RunningGateway, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
COMPLETION: dict[str, Any] = {"model": "test-model", "prompt": "hello", "max_tokens": 4}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(70):
    DEEP = {"type": "array", "items": DEEP}


def by_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> FakeWorker:
    return FakeWorker()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(worker: FakeWorker) -> AsyncIterator[RunningGateway]:
    async with running_gateway(worker) as gateway:
        yield gateway


async def sent(running: RunningGateway, worker: FakeWorker, body: dict[str, Any]) -> pb.Sampling:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = await running.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return worker.submits[-1].sampling


@pytest.mark.parametrize("base", [CHAT, COMPLETION], ids=["chat", "completions"])
@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, pb.GRAMMAR_JSON_OBJECT, ""),
        (by_schema(SCHEMA), pb.GRAMMAR_JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":"))),
        (by_schema(SCHEMA, strict=True), pb.GRAMMAR_JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":"))),
        ({"guided_json": SCHEMA}, pb.GRAMMAR_JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":"))),
        ({"guided_json": json.dumps(SCHEMA)}, pb.GRAMMAR_JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":"))),
        ({"guided_regex": "[ab]+"}, pb.GRAMMAR_REGEX, "[ab]+"),
        ({"guided_choice": ["yes", "nö", "yes"]}, pb.GRAMMAR_CHOICE, '["yes", "nö"]'),
        ({"guided_grammar": 'start: "a"'}, pb.GRAMMAR_LARK, 'start: "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, pb.GRAMMAR_JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":"))),
        ({"structured_outputs": {"json_object": True}}, pb.GRAMMAR_JSON_OBJECT, ""),
        ({"structured_outputs": {"regex": "a"}}, pb.GRAMMAR_REGEX, "a"),
        ({"structured_outputs": {"choice": ["a"]}}, pb.GRAMMAR_CHOICE, '["a"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, pb.GRAMMAR_LARK, 'start: "a"'),
        ({"guided_regex": "a", "response_format": {"type": "text"}, "guided_json": None}, pb.GRAMMAR_REGEX, "a"),
    ],
)
async def test_every_way_of_saying_it_reaches_the_worker(
    running: RunningGateway,
    worker: FakeWorker,
    base: dict[str, Any],
    changes: dict[str, Any],
    kind: pb.GrammarKind.ValueType,
    text: str,
) -> None:
    grammar = (await sent(running, worker, {**base, **changes})).grammar
    assert (grammar.kind, grammar.text, list(grammar.after_token_ids)) == (kind, text, [])


async def test_a_gbnf_grammar_is_turned_into_one_that_workers_read(running: RunningGateway, worker: FakeWorker) -> None:
    body = {**COMPLETION, "guided_grammar": 'root ::= "a" | "b" digit\ndigit ::= [0-9]'}
    grammar = (await sent(running, worker, body)).grammar
    assert grammar.kind == pb.GRAMMAR_LARK
    assert "start:" in grammar.text


async def test_plain_text_has_no_grammar(running: RunningGateway, worker: FakeWorker) -> None:
    assert not (await sent(running, worker, CHAT)).HasField("grammar")
    assert not (await sent(running, worker, {**CHAT, "response_format": {"type": "text"}})).HasField("grammar")


async def test_all_choices_have_the_same_grammar(running: RunningGateway, worker: FakeWorker) -> None:
    before = len(worker.submits)
    await sent(running, worker, {**CHAT, **by_schema(SCHEMA), "n": 3})
    assert len({submit.sampling.grammar.SerializeToString() for submit in worker.submits[before:]}) == 1
    assert len(worker.submits) == before + 3


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        (by_schema({"type": "object", "properties": {"a": "no schema"}}), "response_format", "schema must be"),
        (by_schema({"type": "wizard"}), "response_format", "wizard"),
        (by_schema({"$ref": "#/nowhere"}), "response_format", "nowhere"),
        (by_schema({"type": "string", "pattern": "("}), "response_format", "unclosed group"),
        (by_schema({"not": {"type": "string"}}), "response_format", "not"),
        (by_schema({"type": "integer", "minimum": 5, "maximum": 3}), "response_format", "greater than"),
        (by_schema(DEEP), "response_format", "deeper than 64"),
        (by_schema({"items": {"enum": [1, 0.41538493373871244]}}), "response_format", "15 significant digits"),
        (by_schema({"enum": ["x" * 200_000]}), "response_format", "131072 bytes"),
        (by_schema([]), "response_format", "object or a boolean"),
        (by_schema(None), "response_format", "schema is missing"),
        (by_schema(SCHEMA, strict="yes"), "response_format", "strict"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is missing"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "not supported"),
        ({"response_format": {"type": "xml"}}, "response_format", "must be 'text'"),
        ({"response_format": {}}, "response_format", "must be 'text'"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": 5}, "guided_json", "expected"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": r"[^\s\S]"}, "guided_regex", "no text satisfies"),
        ({"guided_choice": []}, "guided_choice", "must be a choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "none may be empty"),
        ({"guided_choice": ["a"] * 5000}, "guided_choice", "4096"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
        ({"guided_grammar": "start: again\nagain: again"}, "guided_grammar", "no text satisfies"),
        ({"guided_grammar": 'root ::= ("a"'}, "guided_grammar", "GBNF"),
        ({"guided_grammar": "root ::= nowhere"}, "guided_grammar", "GBNF"),
        ({"guided_grammar": 'root ::= "a" ' * 2000}, "guided_grammar", "8192 characters"),
        ({"structured_outputs": {}}, "structured_outputs", "one of json"),
        ({"structured_outputs": {"json": {"type": "wizard"}}}, "structured_outputs", "wizard"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "use one of them"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", "whitespace_pattern"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex", "use one of them"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "use one of them"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "contradicts guided_regex"),
        ({**by_schema(SCHEMA), "min_tokens": 2}, "min_tokens", "contradicts response_format"),
        ({**by_schema(SCHEMA), "tools": TOOLS}, "response_format", "no tool could be called"),
    ],
)
async def test_what_cannot_be_is_refused_before_any_worker_hears_of_it(
    running: RunningGateway, worker: FakeWorker, changes: dict[str, Any], param: str, words: str
) -> None:
    before = len(worker.submits)
    response = await running.client.post("/v1/chat/completions", json={**CHAT, **changes})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]
    assert len(worker.submits) == before
    assert (await running.client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_grammar_is_compiled_once_for_all_who_ask_and_its_verdict_is_kept(
    running: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    original = grammars.compile_grammar

    def counted(tokenizer: Any, kind: str, text: str) -> Any:
        compiled.append(text)
        return original(tokenizer, kind, text)

    monkeypatch.setattr(grammars, "compile_grammar", counted)
    monkeypatch.setattr(grammar_checks, "KEPT_VERDICTS", 3)

    async def ask(regex: str) -> int:
        return (await running.client.post("/v1/completions", json={**COMPLETION, "guided_regex": regex})).status_code

    assert await asyncio.gather(*(ask("once+") for _ in range(8))) == [200] * 8
    assert [await ask("(once"), await ask("(once"), await ask("once+")] == [400, 400, 200]
    assert compiled == ["once+", "(once"]
    for number in range(3):
        await ask(f"other{number}")
    assert await ask("once+") == 200
    assert compiled.count("once+") == 2


@pytest.mark.parametrize(
    ("tail", "after", "opening"),
    [("<think>", ["</think>"], None), ("", ["</think>"], "<think>"), ("<think></think>", [], None)],
    ids=["the prompt opens it", "the model may", "the prompt closes it"],
)
async def test_a_grammar_begins_where_reasoning_ends(tail: str, after: list[str], opening: str | None) -> None:
    card = byte_card(template=TEMPLATE + "{# <think> #}" + tail)
    tokenizer = json.loads(card.tokenizer_json)
    ids = {}
    for mark in ("<think>", "</think>"):
        ids[mark] = max(token["id"] for token in tokenizer["added_tokens"]) + 1
        like = dict(tokenizer["added_tokens"][-1], id=ids[mark], content=mark, special=False)
        tokenizer["added_tokens"].append(like)
    card.tokenizer_json = json.dumps(tokenizer).encode()
    card.vocab_size = max(ids.values()) + 1
    worker = FakeWorker(card)
    async with running_gateway(worker) as running:
        grammar = (await sent(running, worker, {**CHAT, **by_schema(SCHEMA)})).grammar
        assert list(grammar.after_token_ids) == [ids[mark] for mark in after]
        assert grammar.HasField("opening_token_id") == (opening is not None)
        assert grammar.opening_token_id == (0 if opening is None else ids[opening])


async def test_a_model_without_an_end_token_cannot_be_held_to_a_grammar() -> None:
    card = byte_card()
    del card.eos_token_ids[:]
    worker = FakeWorker(card)
    async with running_gateway(worker) as running:
        response = await running.client.post("/v1/completions", json={**COMPLETION, "guided_regex": "a"})
        assert response.status_code == 400
        assert "no end token" in response.json()["error"]["message"]
        assert not worker.submits
