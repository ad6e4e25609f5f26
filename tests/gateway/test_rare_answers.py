"""Rare parameters that are honoured: what they change in prompts and answers. Also in `test_with_workers`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from antiphon_gateway import template_allowance
from antiphon_gateway.auth import cache_salt, own_salt
from antiphon_gateway.templating import MAX_OTHER_CHARACTERS
from antiphon_gateway.tokenization import TokenCodec
from tokenizers import AddedToken, Tokenizer, models
from tokenizers.processors import TemplateProcessing

from tests.support.fake_worker import TEMPLATE, FakeWorker, byte_card, byte_tokenizer
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.rare_checks import CHAT, CHECKS, COMPLETIONS, Asking

pytestmark = pytest.mark.asyncio(loop_scope="module")

IGNORED = "x-antiphon-ignored"
MESSAGES = [{"role": "user", "content": "hello"}]
RAG = "{% for document in documents or [] %}[{{ document.title }}: {{ document.text }}]{% endfor %}"
OWN = "{% for message in messages %}({{ message.content }}){% endfor %}{{ eos_token }}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> FakeWorker:
    return FakeWorker()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(worker: FakeWorker) -> AsyncIterator[RunningGateway]:
    with_documents = FakeWorker(byte_card("reads", template=RAG + TEMPLATE), worker_id="w2")
    async with running_gateway(
        worker, with_documents, trust_request_chat_template=True, keys={"key-a": "a", "key-b": "b"}
    ) as gateway:
        gateway.client.headers["authorization"] = "Bearer key-a"
        yield gateway


@pytest.mark.parametrize("case", CHECKS)
async def test_case(case: str) -> None:
    async with running_gateway(FakeWorker()) as running:
        await CHECKS[case](running.url, "test-model")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_chunks_usage_counts_the_tokens_of_its_text(path: str) -> None:
    """Load tools take a chunk's tokens from it; the last text and the finish reason may be two chunks."""
    async with running_gateway(FakeWorker()) as running:
        asking = Asking(running.url, "test-model")
        for max_tokens in (1, 3):
            stream = await asking.stream(
                path, max_tokens=max_tokens, stream_options={"include_usage": True, "continuous_usage_stats": True}
            )
            text = ""
            for event in stream.events[:-1]:
                (choice,) = event["choices"]
                text += choice["text"] if path == COMPLETIONS else choice["delta"].get("content") or ""
                assert event["usage"]["completion_tokens"] == len(text)
            assert len(text) == max_tokens


async def prompt_of(running: RunningGateway, **fields: Any) -> str:
    """Of a chat, as text."""
    body = {"model": "test-model", "messages": MESSAGES, **fields, "return_token_strs": True}
    response = await running.client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    return "".join(response.json()["token_strs"])


async def test_documents_reach_the_template_and_are_named_where_it_has_no_word_for_them(
    running: RunningGateway,
) -> None:
    documents = [{"title": "a", "text": "b"}, {"title": "c", "text": "d"}]
    assert (await prompt_of(running, model="reads", documents=documents)).startswith("[a: b][c: d]<|im_start|>")
    body = {"model": "reads", "messages": MESSAGES, "max_tokens": 2, "documents": documents}
    response = await running.client.post(CHAT, json=body)
    assert (response.status_code, IGNORED in response.headers) == (200, False)
    response = await running.client.post(CHAT, json={**body, "model": "test-model"})
    assert (response.status_code, response.headers[IGNORED]) == (200, "documents")
    response = await running.client.post(CHAT, json={**body, "model": "test-model", "documents": []})
    assert (response.status_code, IGNORED in response.headers) == (200, False)
    response = await running.client.post(CHAT, json={**body, "documents": "a"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "documents")


async def test_special_tokens_are_added_or_not_as_asked() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)])
    card = byte_card()
    card.tokenizer_json = tokenizer.to_str().encode()
    card.digest = "with-a-beginning"
    async with running_gateway(FakeWorker(card)) as running:
        asking = Asking(running.url, "test-model")
        for path, usual in ((CHAT, False), (COMPLETIONS, True)):
            for wanted in (None, False, True):
                answer = await asking.whole(path, add_special_tokens=wanted, return_token_ids=True)
                ids = (answer if path == CHAT else answer["choices"][0])["prompt_token_ids"]
                assert (ids[0] == 256) is (usual if wanted is None else wanted)


async def test_a_request_may_part_its_tenants_cache_and_never_leaves_it(
    running: RunningGateway, worker: FakeWorker
) -> None:
    async def salt(key: str, **fields: Any) -> bytes:
        for path, prompt in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "hello"})):
            body = {"model": "test-model", "max_tokens": 1, **prompt, **fields}
            response = await running.client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
            assert response.status_code == 200, response.text
        assert worker.submits[-1].cache_salt == worker.submits[-2].cache_salt
        return worker.submits[-1].cache_salt

    salts = [await salt(key, cache_salt=asked) for key in ("key-a", "key-b") for asked in (None, "x", "y")]
    assert len(set(salts)) == 6
    assert salts[0] == cache_salt("a")
    assert salts[1] == own_salt(cache_salt("a"), "x") == await salt("key-a", cache_salt="x")
    assert len(own_salt(b"", "x")) == len(cache_salt("a"))
    for wrong in ("", "x" * 1025, 5):
        response = await running.client.post(
            CHAT, json={"model": "test-model", "messages": MESSAGES, "cache_salt": wrong}
        )
        assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")


async def test_a_template_of_the_requests_own_is_used_where_that_is_allowed(
    running: RunningGateway, worker: FakeWorker
) -> None:
    assert await prompt_of(running, chat_template=OWN) == "(hello)<|im_end|>"
    for stream in (False, True):
        body = {"model": "test-model", "messages": MESSAGES, "max_tokens": 2, "chat_template": OWN, "stream": stream}
        assert (await running.client.post(CHAT, json=body)).status_code == 200
        assert byte_tokenizer().decode(list(worker.submits[-1].prompt_token_ids), skip_special_tokens=False) == (
            "(hello)<|im_end|>"
        )
    body = {"model": "test-model", "messages": MESSAGES, "max_tokens": 2, "documents": [{"text": "x"}]}
    response = await running.client.post(CHAT, json={**body, "chat_template": RAG + OWN})
    assert (response.status_code, IGNORED in response.headers) == (200, False)
    async with running_gateway(FakeWorker()) as strict:
        for path in (CHAT, "/tokenize"):
            response = await strict.client.post(
                path, json={"model": "test-model", "messages": MESSAGES, "chat_template": OWN}
            )
            assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_parameter")
            assert "--trust-request-chat-template" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "{% wizard %}",
        "{{ x | nothing }}",
        "{{ 'a' * 10000000000 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "not " * 5000 + "1 }}",
        "{{ a" + ".b" * 5000 + " }}",
        "{% if a %}" * 500 + "{% endif %}" * 500,
        "{% include 'x' %}",
        "{{ 1 // 0 }}",
        "x" * (MAX_OTHER_CHARACTERS + 1),
    ],
)
async def test_a_template_that_is_none_or_means_harm_is_the_requests_own_fault(
    running: RunningGateway, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_allowance, "LIMIT_CPU_S", 0.05)
    body = {"model": "test-model", "messages": MESSAGES, "chat_template": template}
    response = await running.client.post(CHAT, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] in ("chat_template", "messages")


async def test_spaces_between_special_tokens_are_as_the_tokenizer_has_them(running: RunningGateway) -> None:
    for wanted in (True, False):
        body = {"model": "test-model", "messages": MESSAGES, "max_tokens": 2, "spaces_between_special_tokens": wanted}
        assert (await running.client.post(CHAT, json=body)).status_code == 200
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken("<x>", special=True), AddedToken("<y>", special=True)])
    assert TokenCodec(tokenizer.to_str().encode()).puts_spaces_between_special_tokens
    card = byte_card()
    card.tokenizer_json = tokenizer.to_str().encode()
    card.digest = os.urandom(8).hex()
    async with running_gateway(FakeWorker(card)) as spaced:
        body = {"model": "test-model", "prompt": "a", "spaces_between_special_tokens": False}
        response = await spaced.client.post(COMPLETIONS, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "spaces_between_special_tokens")
