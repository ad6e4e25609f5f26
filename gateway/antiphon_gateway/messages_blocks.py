"""The content blocks of a whole answer, from what its text turned out to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec

from antiphon_gateway.tools import CallArguments, CallBegun, Content, Event, Reasoning


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


def blocks_of(events: Iterable[Event], *, call_id: Callable[[], str], signature: str) -> list[Block]:
    """Of an answer that has ended. `call_id` makes a new id for each call."""
    blocks: list[Block] = []
    arguments: dict[int, str] = {}
    """JSON texts, by the places of their blocks."""
    for event in events:
        last = blocks[-1] if blocks else None
        match event:
            case Content(text) if isinstance(last, TextBlock):
                last.text += text
            case Content(text):
                blocks.append(TextBlock(text))
            case Reasoning(text) if isinstance(last, ThinkingBlock):
                last.thinking += text
            case Reasoning(text):
                blocks.append(ThinkingBlock(text, signature))
            case CallBegun(_, name):
                arguments[len(blocks)] = ""
                blocks.append(ToolUseBlock(call_id(), name, {}))
            case CallArguments(_, text):
                arguments[len(blocks) - 1] += text
    for index, text in arguments.items():
        block = blocks[index]
        assert isinstance(block, ToolUseBlock)
        block.input = _input(text)
    return blocks


def _input(text: str) -> dict[str, Any]:
    """A call's arguments as an object. What is none (the answer was cut in its middle) is kept as it is, under the key
    that Anthropic's documentation has for that."""
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
