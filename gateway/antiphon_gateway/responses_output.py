"""The output of an answer of the Responses API: its items, and the events that tell of them as they grow.

Prose is a message with one text, reasoning a reasoning item, a call a function_call. An item ends where another kind
begins. `Output` makes both, the items and the events, from the same calls: a stream cannot differ from a whole answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from antiphon_gateway.tools import CallArguments, CallBegun, CallEnded, Content, Event, Reasoning


class OutputText(msgspec.Struct, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    text: str


class Message(msgspec.Struct, tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class ReasoningItem(msgspec.Struct, tag="reasoning"):
    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = []


class FunctionCall(msgspec.Struct, tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


Item: TypeAlias = Message | ReasoningItem | FunctionCall

_EVENT = b'event: %b\ndata: {"type":"%b",%b"sequence_number":%d}\n\n'
_NAMES: dict[type[Item], tuple[bytes, bytes]] = {
    Message: (b"response.output_text", b"text"),
    ReasoningItem: (b"response.reasoning_text", b"text"),
    FunctionCall: (b"response.function_call_arguments", b"arguments"),
}
"""Of what an item is made of: how its events begin, and what the last of them calls it."""


class Output:
    """Of one answer."""

    def __init__(self, answer: str, call_id: Callable[[], str]) -> None:
        """`answer`: what the items' ids are made of. `call_id` makes a new id for each call."""
        self.items: list[Item] = []
        self._answer = answer
        self._call_id = call_id
        self._sequence = 0
        self._pieces: list[str] | None = None
        """Of the item that is open, the last one; None: none is."""

    def event(self, kind: bytes, fields: bytes) -> bytes:
        """One event of the stream. `fields`: JSON, each with a comma behind it."""
        self._sequence += 1
        return _EVENT % (kind, kind, fields, self._sequence - 1)

    def take(self, event: Event) -> bytes:
        """What the answer goes on with, as events."""
        match event:
            case Content(text):
                return self._begin(Message) + self._delta(text)
            case Reasoning(text):
                return self._begin(ReasoningItem) + self._delta(text)
            case CallBegun(_, name):
                return self.close() + self._open(FunctionCall(self._id("fc"), "in_progress", self._call_id(), name, ""))
            case CallArguments(_, text):
                return self._delta(text)
            case CallEnded():
                return self.close()

    def close(self, status: str = "completed") -> bytes:
        """End the item that is open, if one is."""
        if self._pieces is None:
            return b""
        item, text, self._pieces = self.items[-1], "".join(self._pieces), None
        item.status = status
        begins, field = _NAMES[type(item)]
        where = self._where
        quoted = msgspec.json.encode(text)
        logprobs = b""
        match item:
            case FunctionCall():
                item.arguments = text
            case Message(content=[part]):
                part.text = text
                logprobs = b'"logprobs":[],'
            case ReasoningItem(content=[part]):
                part.text = text
        out = self.event(begins + b".done", b'%b"%b":%b,%b' % (where, field, quoted, logprobs))
        if not isinstance(item, FunctionCall):
            told = msgspec.json.encode(item.content[0])
            out += self.event(b"response.content_part.done", b'%b"part":%b,' % (where, told))
        return out + self.event(
            b"response.output_item.done",
            b'"output_index":%d,"item":%b,' % (len(self.items) - 1, msgspec.json.encode(item)),
        )

    def _begin(self, kind: type[Message] | type[ReasoningItem]) -> bytes:
        """Nothing, where the item that is open goes on."""
        if self._pieces is not None and type(self.items[-1]) is kind:
            return b""
        closed = self.close()
        part: OutputText | ReasoningText
        item: Message | ReasoningItem
        if kind is Message:
            part, item = OutputText(""), Message(self._id("msg"), "in_progress", [])
        else:
            part, item = ReasoningText(""), ReasoningItem(self._id("rs"), "in_progress", [])
        begun = self._open(item)
        item.content.append(part)  # type: ignore[arg-type]  # each its own kind
        added = self.event(b"response.content_part.added", b'%b"part":%b,' % (self._where, msgspec.json.encode(part)))
        return closed + begun + added

    def _open(self, item: Item) -> bytes:
        self.items.append(item)
        self._pieces = []
        return self.event(
            b"response.output_item.added",
            b'"output_index":%d,"item":%b,' % (len(self.items) - 1, msgspec.json.encode(item)),
        )

    def _delta(self, text: str) -> bytes:
        assert self._pieces is not None
        self._pieces.append(text)
        item = self.items[-1]
        logprobs = b'"logprobs":[],' if isinstance(item, Message) else b""
        return self.event(
            _NAMES[type(item)][0] + b".delta", b'%b"delta":%b,%b' % (self._where, msgspec.json.encode(text), logprobs)
        )

    @property
    def _where(self) -> bytes:
        """The fields that say what an event is about."""
        item = self.items[-1]
        content = b"" if isinstance(item, FunctionCall) else b'"content_index":0,'
        return b'"item_id":"%b","output_index":%d,%b' % (item.id.encode(), len(self.items) - 1, content)

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._answer}_{len(self.items)}"
