"""The awkward requests of `openai_cases`, as far as they mean something elsewhere: `/v1/messages` and `/v1/responses`.

The same conversation is the same prompt whichever way it comes: where a line is about how the prompt is made, chat's
count of prompt tokens is what the other two must count. Lines about what only chat or completions have (n, logprobs,
logit_bias, lists of prompts, echo), or about the size of bodies, which is looked at before the path, have no check
here; `NOWHERE_ELSE` names them.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import httpx

from tests.support.openai_cases import Case, Check, _leave_after_chunks, _metric, _metric_becomes

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
NOWHERE_ELSE = frozenset(
    {
        "S10-n2-stream",
        "S11-logprobs-no-top",
        "S14-logit-bias-oov",
        "S15-echo-zero-max-tokens",
        "S16-prompt-list-with-empty",
        "S17-body-over-2MiB",
    }
)


def said_elsewhere(path: str, chat: dict[str, Any]) -> dict[str, Any]:
    """A chat body in the words of another endpoint."""
    body = {name: chat[name] for name in ("model", "stream", "temperature", "seed") if name in chat}
    limit = chat.get("max_completion_tokens", chat.get("max_tokens"))
    if path == MESSAGES:
        body |= {"max_tokens": limit, "messages": [_message(message) for message in chat["messages"]]}
        tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in _functions(chat)]
    else:
        body |= {
            "max_output_tokens": limit,
            "input": [item for message in chat["messages"] for item in _items(message)],
        }
        tools = [{"type": "function", **function} for function in _functions(chat)]
    return body | ({"tools": tools} if tools else {})


def _functions(chat: dict[str, Any]) -> list[dict[str, Any]]:
    return [tool["function"] for tool in chat.get("tools", ())]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        content = message["content"]
        return {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}],
        }
    if message.get("tool_calls"):
        calls = [
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": json.loads(call["function"]["arguments"]),
            }
            for call in message["tool_calls"]
        ]
        return {"role": "assistant", "content": calls}
    return {"role": message["role"].replace("developer", "system"), "content": message["content"]}


def _items(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if message["role"] == "tool":
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": text}]
    if message.get("tool_calls"):
        return [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in message["tool_calls"]]
    if isinstance(content, list):
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        content = [{"type": kind, "text": part["text"]} for part in content]
    return [{"role": message["role"], "content": content}]


def _prompt_tokens(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    return int(usage["input_tokens"]) + int(usage.get("cache_read_input_tokens") or 0)


async def _ok(case: Case, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await case.post(body, path)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def same_prompt(id: str, path: str, base_url: str, model: str) -> None:
    """As many prompt tokens as chat has of the same conversation."""
    case = Case(id, base_url, model)
    chat = await case.post()
    assert chat.status_code == 200, chat.text
    body = dict(case.body)
    if "tools" in chat.headers.get("x-antiphon-ignored", ""):
        del body["tools"]  # A template without a place for them: refused elsewhere, where they cannot be named.
    answer = await _ok(case, path, said_elsewhere(path, body))
    assert _prompt_tokens(answer) == chat.json()["usage"]["prompt_tokens"]


async def empty_messages(path: str, base_url: str, model: str) -> None:
    case = Case("S06-empty-messages", base_url, model)
    response = await case.post(said_elsewhere(path, case.body), path)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert ("messages" if path == MESSAGES else "input") in error["message"]


async def null_limit(path: str, base_url: str, model: str) -> None:
    """Of responses it is the same as none; messages need one, and say so."""
    case = Case("S07-max-tokens-null", base_url, model)
    chat = {"model": model, "messages": [{"role": "user", "content": case.body["prompt"]}], "max_tokens": None}
    body = said_elsewhere(path, chat)
    if path == RESPONSES:
        body["stream"] = True  # It may be long: its beginning is enough.
    client = httpx.AsyncClient(base_url=base_url, timeout=60.0, trust_env=False)
    async with client, client.stream("POST", path, json=body) as response:
        status = response.status_code
        if status == 400:
            assert "max_tokens" in json.loads(await response.aread())["error"]["message"]
    assert status == (200 if path == RESPONSES else 400)
    await _metric_becomes(base_url, "antiphon_gateway_requests_in_flight", 0)


async def limit(path: str, base_url: str, model: str) -> None:
    case = Case("S08-max-completion-tokens", base_url, model)
    answer = await _ok(case, path, said_elsewhere(path, case.body))
    assert answer["usage"]["output_tokens"] <= 5
    if answer["usage"]["output_tokens"] == 5:
        cut = answer["stop_reason"] == "max_tokens" if path == MESSAGES else answer["status"] == "incomplete"
        assert cut


async def stops(path: str, base_url: str, model: str) -> None:
    """Only messages have them."""
    case = Case("S09-stop-list", base_url, model)
    chat = {"model": model, "messages": [{"role": "user", "content": case.body["prompt"]}], "max_tokens": 32}
    answer = await _ok(case, path, {**said_elsewhere(path, chat), "stop_sequences": case.body["stop"]})
    text = "".join(block["text"] for block in answer["content"])
    assert not any(stop in text for stop in case.body["stop"])
    assert (answer["stop_reason"] == "stop_sequence") == (answer["stop_sequence"] in case.body["stop"])


async def usage_at_the_end(path: str, base_url: str, model: str) -> None:
    case = Case("S12-include-usage-last-chunk", base_url, model)
    events = await _events(case, path, said_elsewhere(path, case.body))
    if path == MESSAGES:
        [last] = [event for event in events if event["type"] == "message_delta"]
        assert events[-1]["type"] == "message_stop"
    else:
        last = events[-1]["response"]
        assert last["usage"]["input_tokens"] > 0
    assert last["usage"]["output_tokens"] > 0


async def bad_schema(path: str, base_url: str, model: str) -> None:
    case = Case("S13-bad-json-schema", base_url, model)
    plain = said_elsewhere(path, case.body)
    schema = case.body["response_format"]["json_schema"]["schema"]
    form = {"type": "json_schema", "schema": schema}
    asked = {"output_config": {"format": form}} if path == MESSAGES else {"text": {"format": {**form, "name": "car"}}}
    response = await case.post({**plain, **asked}, path)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    await _ok(case, path, plain)


async def chunked_upload(path: str, base_url: str, model: str) -> None:
    case = Case("S18-chunked-upload", base_url, model)
    raw = json.dumps(said_elsewhere(path, case.body)).encode()
    size = case.line["transport"]["chunk_bytes"]

    async def parts() -> Any:
        for start in range(0, len(raw), size):
            yield raw[start : start + size]

    async with httpx.AsyncClient(base_url=base_url, timeout=60.0, trust_env=False) as client:
        response = await client.post(path, content=parts(), headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text


async def client_disconnect(path: str, base_url: str, model: str) -> None:
    case = Case("S19-client-disconnect", base_url, model)
    before = await _metric(base_url, "antiphon_gateway_cancelled_total")
    body = said_elsewhere(path, {**case.body, "stream": True})
    case.line = {**case.line, "path": path}
    await _leave_after_chunks(case, body, 2)
    await _metric_becomes(base_url, "antiphon_gateway_cancelled_total", before + 1)
    await _metric_becomes(base_url, "antiphon_gateway_requests_in_flight", 0)


async def emoji(path: str, base_url: str, model: str) -> None:
    case = Case("S20-emoji-split-tokens", base_url, model)
    body = said_elsewhere(path, {**case.body, "seed": 7})
    whole = await _ok(case, path, {**body, "stream": False})
    events = await _events(case, path, body)
    if path == MESSAGES:
        deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
        said = "".join(block["text"] for block in whole["content"])
    else:
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        said = "".join(part["text"] for item in whole["output"] for part in item["content"])
    assert "".join(deltas) == said


async def _events(case: Case, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a stream: each is valid UTF-8 and JSON, and is called what its type says."""
    response = await case.post(body, path)
    assert response.status_code == 200, response.text
    events = []
    for event in response.content.decode("utf-8").removesuffix("\n\n").split("\n\n"):
        name, _, data = event.partition("\n")
        found = json.loads(data.removeprefix("data: "))
        assert name == f"event: {found['type']}"
        events.append(found)
    return events


_SAME_PROMPT = (
    "S01-null-content-toolcalls",
    "S02-empty-assistant-content",
    "S03-content-parts-array",
    "S04-developer-role",
    "S05-tool-content-array",
)
_OTHERS: dict[str, Any] = {
    "S06-empty-messages": empty_messages,
    "S07-max-tokens-null": null_limit,
    "S08-max-completion-tokens": limit,
    "S12-include-usage-last-chunk": usage_at_the_end,
    "S13-bad-json-schema": bad_schema,
    "S18-chunked-upload": chunked_upload,
    "S19-client-disconnect": client_disconnect,
    "S20-emoji-split-tokens": emoji,
}
_PATHS = (MESSAGES, RESPONSES)
CHECKS: dict[str, Check] = {
    **{f"{id} {path}": functools.partial(same_prompt, id, path) for id in _SAME_PROMPT for path in _PATHS},
    **{f"{id} {path}": functools.partial(check, path) for id, check in _OTHERS.items() for path in _PATHS},
    f"S09-stop-list {MESSAGES}": functools.partial(stops, MESSAGES),
}
