"""A client that people use: the `openai` package."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import openai
import pytest
from antiphon_proto import worker_pb2 as pb
from openai.types.chat import ChatCompletionUserMessageParam

from tests.support.fake_worker import Connection, FakeWorker, tokens
from tests.support.gateway import running_gateway

MESSAGES: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hello"}]


@contextlib.asynccontextmanager
async def sdk(worker: FakeWorker) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        running_gateway(worker) as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_chat_streamed_and_not_and_completions() -> None:
    async with sdk(FakeWorker()) as client:
        assert [model.id async for model in client.models.list()] == ["test-model"]
        whole = await client.chat.completions.create(model="test-model", messages=MESSAGES, max_tokens=8, seed=1)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 8
        assert whole.usage.prompt_tokens_details is not None
        text = whole.choices[0].message.content
        stream = await client.chat.completions.create(
            model="test-model",
            messages=MESSAGES,
            max_tokens=8,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage == whole.usage
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
        completion = await client.completions.create(model="test-model", prompt=["a", "b"], max_tokens=4, logprobs=2)
        assert [len(choice.text) for choice in completion.choices] == [4, 4]


async def test_errors_become_the_clients_own() -> None:
    async with sdk(FakeWorker()) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="test-model", messages=MESSAGES, temperature=9.0)
        assert refused.value.param == "temperature"


async def test_an_error_in_mid_stream_is_raised() -> None:
    async def fail(worker: FakeWorker, connection: Connection, submit: pb.Submit) -> None:
        connection.accept(submit.ref)
        await tokens(connection, submit, b"ab", finish=False)
        connection.step(submit.ref, finish=pb.FINISH_ERROR, error="out of luck")

    async with sdk(FakeWorker(behaviour=fail)) as client:
        stream = await client.chat.completions.create(model="test-model", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="out of luck"):
            [chunk async for chunk in stream]
