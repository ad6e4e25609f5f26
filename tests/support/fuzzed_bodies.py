"""Bodies that are half right: drawn by hypothesis, for servers that have to refuse or serve them, and nothing else.

Each is a good body in which a few fields have other values: plausible ones, ones of another kind, and ones at the ends
of what there is. Some are cut, or have a byte changed, and are not JSON then.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from antiphon_gateway.parameters import PARAMETERS, Endpoint
from hypothesis import strategies as st

_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 255, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**400),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf")),
    *("", "a", " ", "\x00", "none", "auto", "required", "text", "\u2028", "\ud800", "e\u0301" * 40, "x" * 3000),
    *([], [[]], [None], [0], ["a"], [{}], [1, "a"], {}, {"a": None}, {"type": None}, {"type": "text"}, [[[[[[]]]]]]),
)
_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
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
_PLAUSIBLE: dict[str, tuple[Any, ...]] = {
    "prompt": ("hi", ["a", "b"], [1, 2, 3], [[1], [2, 3]], [258, 259], ["a", 1], "\u00e9" * 50, [10**30]),
    "n": (1, 3, 16, 17),
    "stream": (True,),
    "stream_options": ({"include_usage": True}, {"include_usage": "yes"}, {"sparkle": 1}),
    "max_tokens": (0, 1, 5, 50, 1000),
    "max_completion_tokens": (1, 4),
    "min_tokens": (1, 3),
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
    "tools": ([_TOOL], [_TOOL, _TOOL], [{**_TOOL, "type": "x"}], [{"function": {}}]),
    "tool_choice": ({"type": "function", "function": {"name": "f"}}, {"type": "function"}),
    "reasoning_effort": ("low", "heroic"),
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
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1]},
}
_PATHS: Sequence[str] = [*[Endpoint.CHAT.value] * 5, *[Endpoint.COMPLETIONS.value] * 4, *list(_GOOD)[2:]]
_NAMES: dict[str, list[str]] = {
    path: sorted(
        {row.name for row in PARAMETERS if path in {endpoint.value for endpoint in row.endpoints}}
        | set(_PLAUSIBLE)
        | {"unknown"}
    )
    for path in _GOOD
}


@dataclass(frozen=True, slots=True)
class Fuzzed:
    path: str
    raw: bytes


@st.composite
def fuzzed(draw: st.DrawFn, model: str) -> Fuzzed:
    """One body for one path."""
    path = draw(st.sampled_from(_PATHS))
    body: dict[str, Any] = {"model": model, **_GOOD[path]}
    for name in draw(st.lists(st.sampled_from(_NAMES[path]), max_size=5)):
        if name == "messages":
            body[name] = draw(st.lists(st.sampled_from(_MESSAGES), max_size=4))
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
