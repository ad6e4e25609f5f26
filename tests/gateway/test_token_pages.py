"""What a text is in tokens, asked of the gateway, and back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_worker import FakeWorker
from tests.support.gateway import RunningGateway, running_gateway

CHAT = [{"role": "user", "content": "naïve 🏳️‍🌈"}]


async def ask(running: RunningGateway, path: str, **body: Any) -> tuple[int, Any]:
    answer = await running.client.post(path, json=body)
    return answer.status_code, answer.json()


async def test_a_text_and_back() -> None:
    async with running_gateway(FakeWorker()) as running:
        model = (await running.client.get("/v1/models")).json()["data"][0]
        status, page = await ask(running, "/tokenize", model=model["id"], prompt="naïve 🏳️‍🌈", return_token_strs=True)
        assert status == 200
        assert page["count"] == len(page["tokens"]) == len(page["token_strs"])
        assert page["max_model_len"] == model["max_model_len"]
        status, text = await ask(running, "/detokenize", model=model["id"], tokens=page["tokens"])
        assert (status, text) == (200, {"prompt": "naïve 🏳️‍🌈"})


async def test_a_chat_is_as_many_tokens_as_its_prompt_will_be() -> None:
    async with running_gateway(FakeWorker()) as running:
        model = (await running.client.get("/v1/models")).json()["data"][0]["id"]
        _, page = await ask(running, "/tokenize", model=model, messages=CHAT)
        _, answer = await ask(running, "/v1/chat/completions", model=model, messages=CHAT, max_tokens=1)
        assert page["count"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": 1}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: dict[str, Any], status: int, param: str) -> None:
    async with running_gateway(FakeWorker()) as running:
        model = (await running.client.get("/v1/models")).json()["data"][0]["id"]
        answered, error = await ask(running, path, model=model, **body)
        assert (answered, error["error"]["param"]) == (status, param)


async def test_a_name_that_nobody_has_and_a_stranger() -> None:
    async with running_gateway(FakeWorker(), keys={"secret": "tenant"}) as running:
        running.client.headers["authorization"] = "Bearer secret"
        assert (await ask(running, "/tokenize", model="nobody", prompt="a"))[0] == 404
        running.client.headers["authorization"] = "Bearer wrong"
        assert (await ask(running, "/tokenize", model="nobody", prompt="a"))[0] == 401
        assert (await ask(running, "/detokenize", model="nobody", tokens=[1]))[0] == 401
