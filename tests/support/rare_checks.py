"""Rare parameters that are honoured, as checks that run against a gateway with any workers whose tokens are bytes.

Each takes (base URL, model name). Whole and streamed answers have to say the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.support.openai_cases import Stream, parse_stream

Check = Callable[[str, str], Awaitable[None]]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello, how are you?"}]


class Asking:
    """One server, asked for one model."""

    def __init__(self, base_url: str, model: str) -> None:
        self._base_url = base_url
        self._model = model

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        usual: dict[str, Any] = {"max_tokens": 6, "seed": 7, "ignore_eos": True}
        if path == CHAT:
            usual["messages"] = _MESSAGES
        elif path == COMPLETIONS:
            usual["prompt"] = "hello, how are you?"
        else:
            usual = {}
        async with httpx.AsyncClient(base_url=self._base_url, timeout=60.0, trust_env=False, verify=False) as client:
            return await client.post(path, json={**usual, "model": self._model, **fields})

    async def whole(self, path: str, **fields: Any) -> dict[str, Any]:
        response = await self.post(path, **fields)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def stream(self, path: str, **fields: Any) -> Stream:
        response = await self.post(path, stream=True, **fields)
        assert response.status_code == 200, response.text
        stream = parse_stream(response.content)
        assert stream.done == 1
        return stream

    async def ids(self, **fields: Any) -> list[int]:
        tokens: list[int] = (await self.whole("/tokenize", **fields))["tokens"]
        return tokens


def text_of(stream: Stream, path: str, index: int = 0) -> str:
    return stream.text(index) if path == CHAT else "".join(choice["text"] for choice in stream.choices(index))


async def token_ids_are_told(base_url: str, model: str) -> None:
    asking = Asking(base_url, model)
    for path in (CHAT, COMPLETIONS):
        whole = await asking.whole(path, return_token_ids=True, n=2)
        prompt_ids = await asking.ids(
            **({"messages": _MESSAGES} if path == CHAT else {"prompt": "hello, how are you?"})
        )
        streamed = await asking.stream(path, return_token_ids=True, n=2, stream_options={"include_usage": True})
        for choice in whole["choices"]:
            ids = choice["token_ids"]
            assert len(ids) == 6
            told = streamed.choices(choice["index"])
            assert [token_id for chunk in told for token_id in chunk.get("token_ids", ())] == ids
            assert "token_ids" in told[-1]
            firsts = [event for event in streamed.events if choice["index"] in [c["index"] for c in event["choices"]]]
            where = firsts[0] if path == CHAT else told[0]
            assert where["prompt_token_ids"] == prompt_ids
            assert sum("prompt_token_ids" in chunk for chunk in (firsts if path == CHAT else told)) == 1
            assert (whole if path == CHAT else choice)["prompt_token_ids"] == prompt_ids
        plain = await asking.whole(path, n=2, user="anybody")
        assert not {"prompt_token_ids", "token_ids"} & {*plain, *plain["choices"][0]}
        assert streamed.events[-1]["usage"] == whole["usage"] | {
            "prompt_tokens_details": streamed.events[-1]["usage"]["prompt_tokens_details"]
        }


async def tokens_are_called_by_their_ids(base_url: str, model: str) -> None:
    asking = Asking(base_url, model)
    wishes: dict[str, Any] = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    whole = (await asking.whole(CHAT, logprobs=True, top_logprobs=2, **wishes))["choices"][0]
    names = [entry["token"] for entry in whole["logprobs"]["content"]]
    assert names == [f"token_id:{token_id}" for token_id in whole["token_ids"]]
    for entry in whole["logprobs"]["content"]:
        assert all(best["token"].startswith("token_id:") for best in entry["top_logprobs"])
        assert bytes(entry["bytes"])
    streamed = await asking.stream(CHAT, logprobs=True, **wishes)
    told = [chunk["logprobs"] for chunk in streamed.choices(0) if chunk["logprobs"] is not None]
    assert [entry["token"] for part in told for entry in part["content"]] == names
    whole = (await asking.whole(COMPLETIONS, logprobs=1, **wishes))["choices"][0]
    assert whole["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in whole["token_ids"]]
    assert whole["logprobs"]["text_offset"][:2] == [0, 1]
    assert all(name.startswith("token_id:") for best in whole["logprobs"]["top_logprobs"] for name in best)
    streamed = await asking.stream(COMPLETIONS, logprobs=1, **wishes)
    told = [chunk["logprobs"] for chunk in streamed.choices(0) if chunk["logprobs"] is not None]
    assert [name for part in told for name in part["tokens"]] == whole["logprobs"]["tokens"]


async def usage_goes_with_each_chunk(base_url: str, model: str) -> None:
    asking = Asking(base_url, model)
    for path in (CHAT, COMPLETIONS):
        options = {"continuous_usage_stats": True, "include_usage": True}
        streamed = await asking.stream(path, n=2, stream_options=options)
        last = streamed.events[-1]
        assert last["choices"] == []
        for index in (0, 1):
            counts = [event["usage"] for event in streamed.events[:-1] if event["choices"][0]["index"] == index]
            assert all(count["total_tokens"] == count["prompt_tokens"] + count["completion_tokens"] for count in counts)
            told = [count["completion_tokens"] for count in counts]
            assert told == sorted(told)
            assert (told[0], told[-1]) == (0 if path == CHAT else told[0], 6)
            assert {count["prompt_tokens"] for count in counts} == {last["usage"]["prompt_tokens"]}
        assert last["usage"]["completion_tokens"] == 12
        alone = await asking.stream(path, stream_options={"continuous_usage_stats": True})
        assert all(event["usage"]["total_tokens"] for event in alone.events)


async def prompts_are_cut(base_url: str, model: str) -> None:
    asking = Asking(base_url, model)
    all_ids = {CHAT: await asking.ids(messages=_MESSAGES), COMPLETIONS: await asking.ids(prompt="hello, how are you?")}
    for path, ids in all_ids.items():
        for side, kept in ((None, ids[-9:]), ("left", ids[-9:]), ("right", ids[:9])):
            wishes = {"truncate_prompt_tokens": 9, "truncation_side": side, "return_token_ids": True}
            whole = await asking.whole(path, **wishes)
            assert whole["usage"]["prompt_tokens"] == 9
            assert (whole if path == CHAT else whole["choices"][0])["prompt_token_ids"] == kept
            streamed = await asking.stream(path, **wishes)
            first = streamed.events[0] if path == CHAT else streamed.events[0]["choices"][0]
            assert first["prompt_token_ids"] == kept
        for enough in (len(ids), 100_000, -1):
            whole = await asking.whole(path, truncate_prompt_tokens=enough)
            assert whole["usage"]["prompt_tokens"] == len(ids)
        for wrong in (0, -2):
            response = await asking.post(path, truncate_prompt_tokens=wrong)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    whole = await asking.whole(COMPLETIONS, prompt=all_ids[COMPLETIONS], truncate_prompt_tokens=4, echo=True)
    assert whole["choices"][0]["text"].startswith("you?")
    response = await asking.post(CHAT, truncation_side="middle")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "truncation_side")


async def an_answered_message_is_echoed(base_url: str, model: str) -> None:
    asking = Asking(base_url, model)
    messages = [*_MESSAGES, {"role": "assistant", "content": "I am "}]
    for continues in (True, False):
        wishes = {"messages": messages, "continue_final_message": continues}
        plain = (await asking.whole(CHAT, **wishes))["choices"][0]["message"]["content"]
        whole = (await asking.whole(CHAT, echo=True, **wishes))["choices"][0]["message"]
        assert (whole["role"], whole["content"]) == ("assistant", f"I am {plain}")
        streamed = await asking.stream(CHAT, echo=True, **wishes)
        assert streamed.text() == f"I am {plain}"
        assert streamed.choices(0)[0]["delta"]["role"] == "assistant"
    plain = (await asking.whole(CHAT))["choices"][0]["message"]["content"]
    assert (await asking.whole(CHAT, echo=True))["choices"][0]["message"]["content"] == plain
    assert (await asking.stream(CHAT, echo=True)).text() == plain


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        token_ids_are_told,
        tokens_are_called_by_their_ids,
        usage_goes_with_each_chunk,
        prompts_are_cut,
        an_answered_message_is_echoed,
    )
}
