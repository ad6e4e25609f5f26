"""Bodies that are half right: drawn by hypothesis, for servers that have to refuse or serve them, and nothing else.

Each is a good body in which a few fields have other values: plausible ones, ones of another kind, and ones at the ends
of what there is. Some are cut, or have a byte changed, and are not JSON then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from antiphon_gateway.messages_body import MessageBody
from antiphon_gateway.parameters import PARAMETERS, Endpoint
from antiphon_gateway.responses_body import ResponseBody
from hypothesis import strategies as st

_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 255, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**400),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf")),
    *("", "a", " ", "\x00", "none", "auto", "required", "text", "\u2028", "\ud800", "e\u0301" * 40, "x" * 3000),
    *([], [[]], [None], [0], ["a"], [{}], [1, "a"], {}, {"a": None}, {"type": None}, {"type": "text"}, [[[[[[]]]]]]),
)
_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_FLAT_TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
_CLIENTS_TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_MESSAGES: tuple[Any, ...] = (
    {"role": "user", "content": "hello"},
    {"role": "system", "content": ""},
    {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]},
    {"role": "assistant", "content": "I th", "reasoning": "so"},
    {"role": "tool", "tool_call_id": "c", "content": "7"},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    {"role": "assistant", "tool_calls": {"a": 1}},
    {"role": ["user"], "content": {}},
    {"content": "x", "role": "user", "name": 5},
    {"role": "user", "content": "<|im_end|>\ud83d"},
    None,
)
_ITEMS: tuple[Any, ...] = (
    {"role": "user", "content": "hello"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I", "annotations": []}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "7"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
    {"type": "item_reference", "id": "x"},
    {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
    {"role": "system", "content": [{"type": "input_text", "text": ""}]},
    {"type": "wizard"},
    5,
)
_TURNS: tuple[Any, ...] = (
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": [{"type": "text", "text": "I"}, {"type": "tool_use", "id": "c", "name": "f"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "7"}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "so", "signature": "x"}]},
    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]},
    {"role": "user", "content": []},
    *_MESSAGES[5:8],
)
_PLAUSIBLE: dict[str, tuple[Any, ...]] = {
    "prompt": ("hi", ["a", "b"], [1, 2, 3], [[1], [2, 3]], [258, 259], ["a", 1], "\u00e9" * 50, [10**30]),
    "n": (1, 3, 16, 17),
    "stream": (True,),
    "stream_options": (
        {"include_usage": True},
        {"include_usage": "yes"},
        {"sparkle": 1},
        {"continuous_usage_stats": True},
        {"continuous_usage_stats": True, "include_usage": True},
    ),
    "max_tokens": (0, 1, 5, 50, 1000),
    "max_completion_tokens": (1, 4),
    "min_tokens": (1, 3),
    "prompt_logprobs": (0, 2, 20, 21),
    "allowed_token_ids": ([1, 2], [5], [97, 98, 99], [256], [999999], []),
    "bad_words": (["a"], ["a", " b"], [" "], [""], ["\u00e9" * 60]),
    "logprobs": (True, 0, 3),
    "top_logprobs": (2, 20),
    "temperature": (0, 0.7, 2, 2.1),
    "top_p": (0, 0.5, 1),
    "logit_bias": ({"1": 5}, {"258": -100, "97": 100}, {"99999": 1}, {"x": 1}, {"1" * 5000: 1}),
    "stop": ("a", ["a", "bc"], ["a"] * 5, [""]),
    "stop_token_ids": ([256], [1, 2], [-1]),
    "response_format": (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "wizard"}}},
        {"type": "json_schema"},
    ),
    "structured_outputs": (
        {"regex": "a+"},
        {"regex": "("},
        {"choice": ["a", "b"]},
        {"grammar": "start: "},
        {"json": 5},
    ),
    "guided_regex": ("[ab]{1,3}", "(((", "a{999999999}"),
    "guided_choice": (["yes", "no"], [""]),
    "tools": ([_TOOL], [_TOOL, _TOOL], [{**_TOOL, "type": "x"}], [{"function": {}}], [_FLAT_TOOL], [_CLIENTS_TOOL]),
    "tool_choice": (
        {"type": "function", "function": {"name": "f"}},
        {"type": "function"},
        {"type": "function", "name": "f"},
        {"type": "tool", "name": "f"},
        {"type": "any"},
    ),
    "reasoning_effort": ("low", "heroic"),
    "truncate_prompt_tokens": (1, 5, 100, -1, 0),
    "truncation_side": ("left", "right"),
    "add_special_tokens": (True, False),
    "return_token_ids": (True,),
    "return_tokens_as_token_ids": (True,),
    "echo": (True,),
    "documents": ([{"title": "a", "text": "b"}], [{"a": {"b": [1]}}]),
    "chat_template": (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ messages[7].content }}",
        "{{ 'a' * 99999999999 }}",
        "{% if",
    ),
    "cache_salt": ("x", "x" * 1025),
    "input": ("hello", "", *[[item] for item in _ITEMS], [_ITEMS[0], _ITEMS[2], _ITEMS[3]]),
    "instructions": ("be brief",),
    "previous_response_id": ("resp_x",),
    "text": ({"format": {"type": "json_schema", "name": "s", "schema": _SCHEMA}}, {"format": {"type": "json_object"}}),
    "reasoning": ({"effort": "low"}, {"effort": "heroic", "summary": "auto"}),
    "max_output_tokens": (0, 1, 5, 1000),
    "truncation": ("auto", "disabled"),
    "include": (["reasoning.encrypted_content"], []),
    "stop_sequences": (["a"], ["a", "bc"], [""]),
    "output_config": ({"effort": "low"}, {"format": {"type": "json_schema", "schema": _SCHEMA}}),
    "chat_template_kwargs": ({"a": 1}, {"messages": []}, {"loop": 1, "range": None}),
    "continue_final_message": (True,),
    "service_tier": ("flex", "priority", "wizard"),
    "priority": (-5, 5),
    "tokens": ([1, 2], [999999], [256, 257]),
    "system": ("be brief", [{"type": "text", "text": "x"}]),
    "thinking": ({"type": "enabled", "budget_tokens": 10},),
}
_CHAT: dict[str, Any] = {"messages": [_MESSAGES[0]], "max_tokens": 3}
_GOOD: dict[str, dict[str, Any]] = {
    Endpoint.CHAT.value: _CHAT,
    Endpoint.COMPLETIONS.value: {"prompt": "hello", "max_tokens": 3},
    "/v1/messages": _CHAT,
    "/v1/messages/count_tokens": {"messages": [_MESSAGES[0]]},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1]},
}
_PATHS: Sequence[str] = [
    *[Endpoint.CHAT.value] * 5,
    *[Endpoint.COMPLETIONS.value] * 4,
    *["/v1/responses", "/v1/messages"] * 3,
    *list(_GOOD)[2:],
]
_FIELDS: dict[str, tuple[str, ...]] = {
    "/v1/responses": ResponseBody.__struct_fields__,
    "/v1/messages": MessageBody.__struct_fields__,
    "/v1/messages/count_tokens": MessageBody.__struct_fields__,
}
"""Where the bodies say themselves what they have."""


def _names(path: str) -> list[str]:
    """What a body may have there: its own fields, and what bodies of other paths have less often."""
    if path in _FIELDS:
        return sorted({*_FIELDS[path], "unknown", *list(_PLAUSIBLE)[::4]})
    rows = {row.name for row in PARAMETERS if path in {endpoint.value for endpoint in row.endpoints}}
    return sorted(rows | set(_PLAUSIBLE) | {"unknown"})


_NAMES: dict[str, list[str]] = {path: _names(path) for path in _GOOD}
_FAILED = re.compile(rb'"error": ?[{"]|"response\.failed"|event: error')


@dataclass(frozen=True, slots=True)
class Fuzzed:
    path: str
    raw: bytes


def is_fault(status: int, answer: bytes) -> bool:
    """No body may be answered so: with a fault, or with an answer that begins well and ends in an error."""
    return status >= 500 or (status == 200 and _FAILED.search(answer) is not None)


@st.composite
def fuzzed(draw: st.DrawFn, model: str) -> Fuzzed:
    """One body for one path."""
    path = draw(st.sampled_from(_PATHS))
    body: dict[str, Any] = {"model": model, **_GOOD[path]}
    for name in draw(st.lists(st.sampled_from(_NAMES[path]), max_size=5)):
        if name == "messages":
            messages = _TURNS if path.startswith("/v1/messages") else _MESSAGES
            body[name] = draw(st.lists(st.sampled_from(messages), max_size=4))
        elif name in _PLAUSIBLE and draw(st.booleans()):
            body[name] = draw(st.sampled_from(_PLAUSIBLE[name]))
        elif name != "model" or draw(st.booleans()):
            body[name] = draw(st.sampled_from(_ODD))
    raw = json.dumps(body).encode()
    spoilt = draw(st.integers(0, 30))
    if spoilt == 0:
        raw = raw[: draw(st.integers(0, len(raw)))]
    elif spoilt == 1:
        position = draw(st.integers(0, len(raw) - 1))
        raw = raw[:position] + bytes([draw(st.integers(0, 255))]) + raw[position + 1 :]
    return Fuzzed(path, raw)
