"""The awkward requests of `tests/data/openai_requests.jsonl`, as checks that run against any OpenAI-compatible server.

`CHECKS` has one coroutine function per line of the file; each takes (base URL, model name) and raises AssertionError
where the server does not do what the line's `expected` says. They assume nothing of what the model answers.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

Check = Callable[[str, str], Awaitable[None]]

_FILE = Path(__file__).parent.parent / "data" / "openai_requests.jsonl"


@functools.cache
def lines() -> dict[str, dict[str, Any]]:
    """The file's lines by id."""
    with _FILE.open(encoding="utf-8") as file:
        return {line["id"]: line for line in map(json.loads, file)}


@dataclass(slots=True)
class Stream:
    """A streamed answer, read to its end."""

    events: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0

    def choices(self, index: int) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", ()) if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(choice["delta"].get("content") or "" for choice in self.choices(index))

    def finish_reasons(self, index: int = 0) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices(index) if choice["finish_reason"] is not None]


def parse_stream(raw: bytes) -> Stream:
    """Split by events; each is one line of data, valid UTF-8 and JSON."""
    stream = Stream()
    assert raw.endswith(b"\n\n"), raw[-100:]
    for event in raw.split(b"\n\n")[:-1]:
        assert event.startswith(b"data: "), event
        assert b"\n" not in event
        data = event.removeprefix(b"data: ").decode("utf-8")
        assert not stream.done, "something came after [DONE]"
        if data == "[DONE]":
            stream.done += 1
        else:
            stream.events.append(json.loads(data, parse_constant=_no_constant))
    return stream


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


class Case:
    """One line of the file, to be sent to one server."""

    def __init__(self, id: str, base_url: str, model: str) -> None:
        self.line = lines()[id]
        self.base_url = base_url
        self.body: dict[str, Any] = copy.deepcopy(self.line["body"])
        self.body["model"] = model

    async def post(self, body: dict[str, Any] | None = None, path: str = "") -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.base_url, timeout=60.0, trust_env=False) as client:
            return await client.post(path or self.line["path"], json=self.body if body is None else body)

    async def ok(self, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send, and expect 200 with an object."""
        response = await self.post(body)
        assert response.status_code == 200, response.text
        answer = json.loads(response.text, parse_constant=_no_constant)
        assert isinstance(answer, dict)
        usage = answer["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        return answer

    async def stream(self, body: dict[str, Any] | None = None) -> Stream:
        response = await self.post(body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_stream(response.content)

    async def prompt_tokens(self, **changes: Any) -> int:
        return int((await self.ok({**self.body, **changes}))["usage"]["prompt_tokens"])


def assert_refused(response: httpx.Response, param: str, status: int = 400) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}


async def null_content_with_tool_calls(base_url: str, model: str) -> None:
    case = Case("S01-null-content-toolcalls", base_url, model)
    with_nulls = await case.prompt_tokens()
    absent = copy.deepcopy(case.body)
    for name in ("content", "refusal", "function_call"):
        del absent["messages"][1][name]
    assert await case.prompt_tokens(messages=absent["messages"]) == with_nulls


async def empty_assistant_content(base_url: str, model: str) -> None:
    case = Case("S02-empty-assistant-content", base_url, model)
    kept = await case.prompt_tokens()
    without = [message for message in case.body["messages"] if message["content"]]
    assert await case.prompt_tokens(messages=without) < kept, "the empty turns are part of the prompt"


async def content_parts(base_url: str, model: str) -> None:
    case = Case("S03-content-parts-array", base_url, model)
    parts = await case.prompt_tokens()
    whole = "First half, second half."
    assert parts == await case.prompt_tokens(messages=[{"role": "user", "content": whole}])
    one_part = [{"role": "user", "content": [{"type": "text", "text": whole}]}]
    assert parts == await case.prompt_tokens(messages=one_part)


async def developer_role(base_url: str, model: str) -> None:
    case = Case("S04-developer-role", base_url, model)
    response = await case.post()
    if response.status_code == 400:
        assert_refused(response, "messages[0].role")
        return
    longer = copy.deepcopy(case.body["messages"])
    longer[0]["content"] += " Be brief, be kind and be quick about it."
    assert await case.prompt_tokens(messages=longer) > await case.prompt_tokens()


async def tool_content_parts(base_url: str, model: str) -> None:
    case = Case("S05-tool-content-array", base_url, model)
    joined = copy.deepcopy(case.body["messages"])
    joined[2]["content"] = "Oslo 7 C. Wind 3 m/s."
    assert await case.prompt_tokens() == await case.prompt_tokens(messages=joined)


async def empty_messages(base_url: str, model: str) -> None:
    assert_refused(await Case("S06-empty-messages", base_url, model).post(), "messages")


async def max_tokens_null(base_url: str, model: str) -> None:
    case = Case("S07-max-tokens-null", base_url, model)
    with_null = await case.ok()
    absent = {name: value for name, value in case.body.items() if value is not None}
    assert with_null["usage"] == (await case.ok(absent))["usage"]
    assert with_null["usage"]["completion_tokens"] <= 16


async def max_completion_tokens(base_url: str, model: str) -> None:
    answer = await Case("S08-max-completion-tokens", base_url, model).ok()
    assert answer["usage"]["completion_tokens"] <= 5
    if answer["usage"]["completion_tokens"] == 5:
        assert answer["choices"][0]["finish_reason"] == "length"


async def stop_list(base_url: str, model: str) -> None:
    case = Case("S09-stop-list", base_url, model)
    for stop in (case.body["stop"], "Q:", None, ["a", "b", "c", "d"]):
        choice = (await case.ok({**case.body, "stop": stop}))["choices"][0]
        assert choice["finish_reason"] in ("stop", "length")
        strings = [stop] if isinstance(stop, str) else stop or []
        assert not any(text in choice["text"] for text in strings)
    assert_refused(await case.post({**case.body, "stop": list("abcde")}), "stop")


async def two_choices_streamed(base_url: str, model: str) -> None:
    stream = await Case("S10-n2-stream", base_url, model).stream()
    assert stream.done == 1
    for index in (0, 1):
        choices = stream.choices(index)
        assert choices[0]["delta"]["role"] == "assistant"
        assert sum("role" in choice["delta"] for choice in choices) == 1
        assert len(stream.finish_reasons(index)) == 1
        assert choices[-1]["finish_reason"] is not None
    assert {choice["index"] for event in stream.events for choice in event["choices"]} == {0, 1}


async def logprobs_without_top(base_url: str, model: str) -> None:
    case = Case("S11-logprobs-no-top", base_url, model)
    answer = await case.ok()
    content = answer["choices"][0]["logprobs"]["content"]
    assert content
    for entry in content:
        assert entry["top_logprobs"] == []
        assert entry["logprob"] <= 0.0
        assert isinstance(entry["token"], str)
    with_top = await case.ok({**case.body, "top_logprobs": 3})
    assert all(len(entry["top_logprobs"]) == 3 for entry in with_top["choices"][0]["logprobs"]["content"])


async def usage_in_the_last_chunk(base_url: str, model: str) -> None:
    stream = await Case("S12-include-usage-last-chunk", base_url, model).stream()
    assert stream.done == 1
    *others, last = stream.events
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] > 0
    assert last["usage"]["completion_tokens"] > 0
    assert all(event.get("usage") is None for event in others)
    assert others[-1]["choices"][0]["finish_reason"] is not None


async def bad_json_schema(base_url: str, model: str) -> None:
    case = Case("S13-bad-json-schema", base_url, model)
    assert_refused(await case.post(), "response_format")
    plain = {name: value for name, value in case.body.items() if name != "response_format"}
    await case.ok(plain)


async def logit_bias_out_of_vocabulary(base_url: str, model: str) -> None:
    case = Case("S14-logit-bias-oov", base_url, model)
    plain = {name: value for name, value in case.body.items() if name != "logit_bias"}
    other, refused = await asyncio.gather(case.stream({**plain, "stream": True, "max_tokens": 32}), case.post())
    assert_refused(refused, "logit_bias")
    assert other.done == 1
    await case.ok(plain)


async def echo_without_tokens(base_url: str, model: str) -> None:
    case = Case("S15-echo-zero-max-tokens", base_url, model)
    response = await case.post()
    if response.status_code == 400:
        assert_refused(response, "logprobs")
    else:
        logprobs = response.json()["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"][0] is None
    plain = {name: value for name, value in case.body.items() if name != "logprobs"}
    answer = await case.ok(plain)
    assert answer["choices"][0]["text"] == case.body["prompt"]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] > 0


async def prompt_list_with_an_empty_one(base_url: str, model: str) -> None:
    case = Case("S16-prompt-list-with-empty", base_url, model)
    response = await case.post()
    if response.status_code == 400:
        assert_refused(response, "prompt")
        assert "empty" in response.json()["error"]["message"]
    else:
        assert [choice["index"] for choice in response.json()["choices"]] == [0, 1]
    both = await case.ok({**case.body, "prompt": ["alpha beta", "gamma"]})
    assert [choice["index"] for choice in both["choices"]] == [0, 1]


async def body_over_two_mebibytes(base_url: str, model: str) -> None:
    case = Case("S17-body-over-2MiB", base_url, model)
    generator = case.line["body_gen"]
    case.body["messages"][0]["content"] = generator["repeat"] * generator["times"]
    response = await case.post()
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["code"] == "context_length_exceeded"


async def chunked_upload(base_url: str, model: str) -> None:
    case = Case("S18-chunked-upload", base_url, model)
    raw = json.dumps(case.body).encode()
    size = case.line["transport"]["chunk_bytes"]

    async def parts() -> Any:
        for start in range(0, len(raw), size):
            yield raw[start : start + size]

    async with httpx.AsyncClient(base_url=base_url, timeout=60.0, trust_env=False) as client:
        response = await client.post(case.line["path"], content=parts(), headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text


async def client_disconnect(base_url: str, model: str) -> None:
    """In each variant the server's own gauge of running requests returns, and the request counts as cancelled."""
    case = Case("S19-client-disconnect", base_url, model)
    for variant in case.line["transport"]["variants"]:
        before = await _metric(base_url, "antiphon_gateway_cancelled_total")
        body = {**case.body, "stream": variant != "non-streaming pending", "ignore_eos": True}
        if variant == "mid-stream":
            await _leave_after_chunks(case, body, 2)
        else:
            await _leave_at_once(case, body)
        await _metric_becomes(base_url, "antiphon_gateway_cancelled_total", before + 1)
        await _metric_becomes(base_url, "antiphon_gateway_requests_in_flight", 0)


async def _leave_after_chunks(case: Case, body: dict[str, Any], chunks: int) -> None:
    client = httpx.AsyncClient(base_url=case.base_url, timeout=60.0, trust_env=False)
    async with client, client.stream("POST", case.line["path"], json=body) as response:
        assert response.status_code == 200
        count = 0
        async for line in response.aiter_lines():
            count += line.startswith("data: ")
            if count == chunks:
                return
    raise AssertionError("the answer was too short to leave in its middle")


async def _leave_at_once(case: Case, body: dict[str, Any]) -> None:
    """Send the request, wait until it is being served, and close the connection."""
    served_before = await _metric(case.base_url, "antiphon_gateway_requests_in_flight")
    url = urlsplit(case.base_url)
    raw = json.dumps(body).encode()
    _, writer = await asyncio.open_connection(url.hostname, url.port)
    head = (
        f"POST {case.line['path']} HTTP/1.1",
        "Host: gateway",
        "Content-Type: application/json",
        f"Content-Length: {len(raw)}",
    )
    writer.write("\r\n".join((*head, "", "")).encode() + raw)
    await writer.drain()
    await _metric_becomes(case.base_url, "antiphon_gateway_requests_in_flight", served_before + 1)
    writer.close()
    await writer.wait_closed()


async def _metric(base_url: str, name: str) -> float:
    async with httpx.AsyncClient(base_url=base_url, timeout=10.0, trust_env=False) as client:
        page = (await client.get("/metrics")).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE))


async def _metric_becomes(base_url: str, name: str, value: float) -> None:
    async with asyncio.timeout(10.0):
        while await _metric(base_url, name) != value:  # noqa: ASYNC110  # it can only be asked for
            await asyncio.sleep(0.01)


async def emoji_over_tokens(base_url: str, model: str) -> None:
    case = Case("S20-emoji-split-tokens", base_url, model)
    # An engine may use the seed even where it chooses greedily.
    stream = await case.stream({**case.body, "seed": 7})
    assert stream.done == 1
    whole = await case.ok({**case.body, "seed": 7, "stream": False})
    assert stream.text() == whole["choices"][0]["message"]["content"]


CHECKS: dict[str, Check] = {
    "S01-null-content-toolcalls": null_content_with_tool_calls,
    "S02-empty-assistant-content": empty_assistant_content,
    "S03-content-parts-array": content_parts,
    "S04-developer-role": developer_role,
    "S05-tool-content-array": tool_content_parts,
    "S06-empty-messages": empty_messages,
    "S07-max-tokens-null": max_tokens_null,
    "S08-max-completion-tokens": max_completion_tokens,
    "S09-stop-list": stop_list,
    "S10-n2-stream": two_choices_streamed,
    "S11-logprobs-no-top": logprobs_without_top,
    "S12-include-usage-last-chunk": usage_in_the_last_chunk,
    "S13-bad-json-schema": bad_json_schema,
    "S14-logit-bias-oov": logit_bias_out_of_vocabulary,
    "S15-echo-zero-max-tokens": echo_without_tokens,
    "S16-prompt-list-with-empty": prompt_list_with_an_empty_one,
    "S17-body-over-2MiB": body_over_two_mebibytes,
    "S18-chunked-upload": chunked_upload,
    "S19-client-disconnect": client_disconnect,
    "S20-emoji-split-tokens": emoji_over_tokens,
}
