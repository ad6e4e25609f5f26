"""Clients that people use, and the collected awkward requests, against `antiphon serve` with the real model.

Prefill and decode run in separate processes; what the answers say is the model's affair, what they look like is ours.
Its chat template has a place for tools, which the demo model's own has not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it looks for a newer one when it is imported

import anthropic
import httpx
import litellm
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.support.models import demo_model_with_tools
from tests.support.openai_cases import CHECKS
from tests.support.openai_cases_elsewhere import CHECKS as ELSEWHERE
from tests.support.real_api_checks import CHECKS as REAL
from tests.support.serve import running_serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_QUESTION = [{"role": "user", "content": "Name three primary colours."}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("models") / "demo"
    with running_serve(str(demo_model_with_tools(folder)), "--name", "demo", "--kv-blocks", "1200") as base_url:
        yield base_url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="not needed", max_retries=0, timeout=120) as sdk:
        yield sdk


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "demo"
    assert client.models.retrieve("demo").id == "demo"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=_QUESTION, max_tokens=24, temperature=0)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None


def test_streamed_chat_equals_the_unstreamed_one(client: openai.OpenAI) -> None:
    options = {"model": "demo", "messages": _QUESTION, "max_tokens": 32, "seed": 11, "temperature": 0.7}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=["The capital of France is", "Two plus two is"], max_tokens=8, temperature=0, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.text
        assert choice.logprobs is not None
        assert choice.logprobs.tokens
        assert "".join(choice.logprobs.tokens) == choice.text
    assert "Paris" in answer.choices[0].text


def test_streamed_completions(client: openai.OpenAI) -> None:
    options = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    whole = client.completions.create(**options)
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))
    assert text == whole.choices[0].text


def test_a_second_turn_finds_its_prefix(client: openai.OpenAI) -> None:
    story = "Here is a long story about a lighthouse. " * 40
    messages = [{"role": "user", "content": story + "What is it about?"}]
    first = client.chat.completions.create(model="demo", messages=messages, max_tokens=16, temperature=0)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content or ""},
        {"role": "user", "content": "And who lives there?"},
    ]
    second = client.chat.completions.create(model="demo", messages=messages, max_tokens=16, temperature=0)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= 256


def test_further_choices_compute_nothing_but_what_is_behind_the_last_full_block(url: str) -> None:
    body = {"model": "demo", "prompt": "A prompt of some length, that is new here. " * 60, "n": 3, "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-request-id": "n-shares"}, timeout=120)
    assert answer.status_code == 200, answer.text
    page = httpx.get(f"{url}/v1/antiphon/explain/n-shares", timeout=20).json()
    cached = [choice["attempts"][0]["outcome"]["cached_tokens"] for choice in page["choices"]]
    length = answer.json()["usage"]["prompt_tokens"]
    assert cached == [0, *[(length - 1) // 64 * 64] * 2], (length, cached)


def test_an_answer_that_is_echoed_is_as_likely_as_it_was(client: openai.OpenAI) -> None:
    """With prefill apart, as evaluation harnesses ask. KV is in bf16, and read where it was just computed."""
    text = "The lighthouse keeper counted the steps to the lamp every evening. " * 12
    [own] = client.completions.create(model="demo", prompt=text, max_tokens=12, temperature=0, logprobs=1).choices
    body = {"model": "demo", "prompt": text + own.text, "max_tokens": 0, "logprobs": 1, "echo": True}
    answer = client.completions.create(**body, extra_body={"prompt_logprobs": 1})
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (text + own.text, "length")
    told = choice.logprobs
    assert told is not None
    assert own.logprobs is not None
    assert told.token_logprobs is not None
    assert own.logprobs.token_logprobs is not None
    assert told.token_logprobs[0] is None
    assert told.tokens[-12:] == own.logprobs.tokens
    assert told.token_logprobs[-12:] == pytest.approx(own.logprobs.token_logprobs, abs=0.05)
    entries = choice.model_dump()["prompt_logprobs"]
    assert [min(entry[key]["rank"] for key in entry) for entry in entries[-12:]] == [1] * 12


def test_errors_are_the_sdk_s_own_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=_QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=_QUESTION, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="demo", prompt="word " * 20_000, max_tokens=4)
    assert long.value.code == "context_length_exceeded"


class _Colour(BaseModel):
    """A colour."""

    red: bool
    name: str


def test_langchain(url: str) -> None:
    chat = ChatOpenAI(model="demo", base_url=f"{url}/v1", api_key="none", max_retries=0, max_tokens=24, temperature=0)
    whole = chat.invoke("Name three primary colours.")
    assert whole.content
    assert "".join(str(chunk.content) for chunk in chat.stream("Name three primary colours.")) == whole.content
    colour = chat.bind(max_tokens=200).invoke(
        "A colour, in JSON.",
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "colour",
                "schema": {
                    "type": "object",
                    "properties": {"red": {"type": "boolean"}, "name": {"enum": ["red", "blue"]}},
                    "required": ["red", "name"],
                    "additionalProperties": False,
                },
            },
        },
    )
    assert _Colour.model_validate_json(str(colour.content)).name in ("red", "blue")


def test_litellm(url: str) -> None:
    options = {"model": "openai/demo", "api_base": f"{url}/v1", "api_key": "none", "messages": _QUESTION}
    whole = litellm.completion(**options, max_tokens=24, temperature=0)
    chunks = list(litellm.completion(**options, max_tokens=24, temperature=0, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0


def test_anthropic(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        options = {"model": "demo", "max_tokens": 24, "messages": _QUESTION, "extra_body": {"temperature": 0}}
        whole = client.messages.create(**options)
        with client.messages.stream(**options) as stream:
            text = "".join(stream.text_stream)
        assert text == whole.content[0].text
        assert whole.usage.output_tokens > 0


@pytest.mark.parametrize("case", [*CHECKS, *ELSEWHERE])
async def test_awkward_request(url: str, case: str) -> None:
    await (CHECKS | ELSEWHERE)[case](url, "demo")


@pytest.mark.parametrize("case", REAL)
async def test_tools_schemas_responses_and_messages(url: str, case: str) -> None:
    await REAL[case](url, "demo")
