"""The awkward requests once more, against real worker processes (timed engine): prompts computed on one, answers
decoded on another."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
import pytest_asyncio

from tests.support.gateway import RunningGateway, eventually, running_gateway
from tests.support.openai_cases import CHECKS
from tests.support.openai_cases_elsewhere import CHECKS as ELSEWHERE
from tests.support.rare_checks import CHECKS as RARE_CHECKS
from tests.support.stream_checks import STREAM_CHECKS
from tests.support.workers import WorkerProcess, Workers

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[WorkerProcess]]:
    folder: Path = tmp_path_factory.mktemp("workers")
    async with Workers(folder) as started:
        yield await started.start_all(("--role", "decode"), ("--role", "prefill"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(workers: list[WorkerProcess]) -> AsyncIterator[RunningGateway]:
    async with running_gateway(worker=tuple(worker.ready.address for worker in workers)) as gateway:
        await eventually(lambda: len(gateway.gateway.fleet.workers()) == 2)
        yield gateway


@pytest.mark.parametrize("case", [*CHECKS, *ELSEWHERE, *RARE_CHECKS])
async def test_case(running: RunningGateway, case: str) -> None:
    (model,) = running.gateway.models
    await (CHECKS | ELSEWHERE | RARE_CHECKS)[case](running.url, model.name)
    await eventually(lambda: running.at_rest)


@pytest.mark.parametrize("case", STREAM_CHECKS)
async def test_streams_tell_the_truth(running: RunningGateway, case: str) -> None:
    (model,) = running.gateway.models
    await STREAM_CHECKS[case](running.url, model.name)
    await eventually(lambda: running.at_rest)


async def test_a_salt_of_the_requests_own_parts_the_workers_caches(running: RunningGateway) -> None:
    (model,) = running.gateway.models

    async def cached_tokens(**salt: str) -> int:
        body = {"model": model.name, "prompt": "What a salt keeps apart. " * 30, "max_tokens": 2, **salt}
        response = await running.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    for salt in ({}, {"cache_salt": "x"}, {"cache_salt": "y"}):
        assert await cached_tokens(**salt) == 0, "nobody else's blocks are found"
        assert await cached_tokens(**salt) > 0
    await eventually(lambda: running.at_rest)


@pytest.mark.parametrize("stream", [False, True])
async def test_structured_answers_validate_their_first_token_from_the_prefill_worker(
    running: RunningGateway, stream: bool
) -> None:
    (model,) = running.gateway.models
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 30}, "size": {"enum": ["small", "large"]}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=model.name,
            messages=[{"role": "user", "content": "Describe something, at the length of some blocks. " * 20}],
            response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}},
            n=3,
            stream=stream,
            stream_options={"include_usage": True} if stream else openai.omit,
        )
        texts, finishes = ["", "", ""], set()
        if isinstance(answer, openai.AsyncStream):
            async for chunk in answer:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    finishes |= {choice.finish_reason} - {None}
        else:
            texts = [choice.message.content or "" for choice in answer.choices]
            finishes = {choice.finish_reason for choice in answer.choices}
    assert finishes == {"stop"}
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    assert len(set(texts)) > 1


async def test_anthropics_client_is_answered_by_real_workers(running: RunningGateway) -> None:
    (model,) = running.gateway.models
    asked: dict[str, Any] = {
        "model": model.name,
        "max_tokens": 40,
        "messages": [{"role": "user", "content": "Describe something, at the length of some blocks. " * 20}],
        "extra_body": {"seed": 7},
    }
    tool = {"name": "look", "input_schema": {"type": "object", "properties": {"deep": {"type": "boolean"}}}}
    tool["input_schema"] |= {"required": ["deep"], "additionalProperties": False}  # type: ignore[operator]
    forced = {"tools": [tool], "tool_choice": {"type": "tool", "name": "look"}, "max_tokens": 200}
    async with anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            message = await stream.get_final_message()
        (block,) = whole.content
        assert block.type == "text"
        stop = block.text[10:14]
        stopped = await client.messages.create(**asked, stop_sequences=["never said", stop])
        called = await client.messages.create(**{**asked, **forced})
    assert (message.content[0].text, message.stop_reason) == (block.text, "max_tokens")  # type: ignore[union-attr]
    assert whole.usage.output_tokens == message.usage.output_tokens == 40
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == block.text.partition(stop)[0]  # type: ignore[union-attr]
    (call,) = called.content
    assert (call.type, called.stop_reason) == ("tool_use", "tool_use")
    assert set(call.input) == {"deep"}


@pytest.mark.parametrize(("tokens", "stream"), [(200, False), (1000, True), (1024, False)])
async def test_n_choices_compute_their_prompt_once(
    running: RunningGateway, workers: list[WorkerProcess], tokens: int, stream: bool
) -> None:
    """Counted, on both sides: the prompt, and for each further choice what is behind its last full block."""
    (model,) = running.gateway.models
    choices, answer = 4, 5
    before = [await worker.metric("antiphon_engine_tokens_computed_total") for worker in workers]
    body = {
        "model": model.name,
        "prompt": random.Random(tokens + stream).choices(range(200), k=tokens),
        "n": choices,
        "max_tokens": answer,
        "stream": stream,
    }
    response = await running.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    await eventually(lambda: running.at_rest)
    decoded, prefilled = [
        await worker.metric("antiphon_engine_tokens_computed_total") - had
        for worker, had in zip(workers, before, strict=True)
    ]
    behind = tokens - (tokens - 1) // model.block_tokens * model.block_tokens
    assert tokens <= prefilled <= tokens + (choices - 1) * behind
    assert prefilled + decoded <= tokens + (choices - 1) * behind + choices * (answer + behind)
    if not stream:
        texts = {choice["text"] for choice in response.json()["choices"]}
        assert len(texts) == choices


async def test_nothing_is_left_on_the_workers(running: RunningGateway, workers: list[WorkerProcess]) -> None:
    for worker in workers:
        await worker.until_idle()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_stream_whose_only_worker_dies_ends_with_an_error(tmp_path: Path, number: signal.Signals) -> None:
    async with Workers(tmp_path) as started:
        worker = await started.start("--role", "both")
        async with running_gateway(worker=(worker.ready.address,)) as running:
            await eventually(lambda: len(running.gateway.fleet.workers()) == 1)
            (model,) = running.gateway.models
            body = {"model": model.name, "prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
            lines: list[str] = []
            async with running.client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line:
                        lines.append(line.removeprefix("data: "))
                    if len(lines) == 5:
                        worker.send_signal(number)
            assert response.status_code == 200
            assert "[DONE]" not in lines
            assert json.loads(lines[-1])["error"]["code"] == "worker_failed"
            await eventually(lambda: running.at_rest)
            refused = await running.client.post("/v1/completions", json={**body, "stream": False})
            assert refused.status_code == 503
