"""Chat answers in which calls of tools and reasoning are told apart from the text.

The shape is OpenAI's: a call's first delta has its index, id and name, the following ones its arguments; each choice
ends with one chunk that has a finish reason, `tool_calls` where there were any. Reasoning has no field with OpenAI; it
goes by both names that clients look for, `reasoning` (vLLM now) and `reasoning_content` (vLLM before, DeepSeek).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.answers import FINISH_REASONS, UsageBody, usage
from antiphon_gateway.chat_answer import ChatAnswer
from antiphon_gateway.flight import Choice, Flight, Target
from antiphon_gateway.logprobs import ChatLogprobs
from antiphon_gateway.schema import ChatBody
from antiphon_gateway.tools import (
    AnswerParser,
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Parsing,
    Reasoning,
)


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct):
    id: str
    function: _Function
    type: str = "function"


class _Message(msgspec.Struct, omit_defaults=True):
    role: str
    content: str | None
    refusal: None
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[_ToolCall] = []


class _WholeChoice(msgspec.Struct):
    index: int
    message: _Message
    logprobs: ChatLogprobs | None
    finish_reason: str


class Whole(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[_WholeChoice]
    usage: UsageBody


class _Streamed:
    """What must be known of one choice between its steps."""

    __slots__ = ("begun", "logprobs", "parser")

    def __init__(self, parser: AnswerParser) -> None:
        self.parser = parser
        self.begun = False
        self.logprobs: list[pb.TokenLogprob] = []
        """Of tokens whose text is kept back, or is mark-up: they go with what comes next."""


class ParsedChatRenderer(ChatAnswer):
    """A `Renderer`, as `ChatRenderer`."""

    def __init__(self, answer_id: str, body: ChatBody, target: Target, parsing: Parsing) -> None:
        super().__init__(answer_id, body, target)
        self._parsing = parsing
        self._streamed: dict[int, _Streamed] = {}

    def take(self, choice: Choice, step: pb.RequestStep) -> bytes:
        if not (step.text or step.finish or step.token_ids):
            return b""
        streamed = self._streamed.get(choice.index)
        if streamed is None:
            streamed = self._streamed[choice.index] = _Streamed(self._parsing.parser())
        chunks: list[bytes] = []
        if not streamed.begun:
            streamed.begun = True
            # Whether there will be any content is not known yet, where there may be calls instead.
            content = b"null" if self._parsing.tools else b'""'
            chunks.append(self._chunk(choice, b'{"role":"assistant","content":' + content + b"}", b"null"))
        events = streamed.parser.push(step.text)
        if step.finish:
            events += streamed.parser.end()
        streamed.logprobs += step.logprobs
        for event in events:
            delta = self._delta(event)
            if delta is not None:
                chunks.append(self._chunk(choice, delta, self._take_logprobs(streamed)))
        if step.finish:
            reason = msgspec.json.encode(self._finish(step.finish, streamed.parser))
            chunks.append(self._chunk(choice, b"{}", self._take_logprobs(streamed), reason))
        return b"".join(chunks)

    def whole(self, flight: Flight) -> bytes:
        choices = []
        for choice in flight.choices:
            parser = self._parsing.parser()
            message = self._message([*parser.push("".join(choice.texts)), *parser.end()])
            logprobs = self._content(choice.logprobs) if self._logprobs else None
            choices.append(_WholeChoice(choice.index, message, logprobs, self._finish(choice.finish, parser)))
        return msgspec.json.encode(
            Whole(
                self._id,
                "chat.completion",
                self._created,
                self._name,
                choices,
                usage(flight, self._reasoning_tokens(flight)),
            )
        )

    def end(self, flight: Flight) -> bytes:
        return self._frame.last(flight, self._reasoning_tokens(flight) if self._include_usage else None)

    def _reasoning_tokens(self, flight: Flight) -> int | None:
        return self._parsing.reasoning_tokens(flight.model, [choice.output for choice in flight.choices])

    # -- parts

    def _chunk(self, choice: Choice, delta: bytes, logprobs: bytes, finish: bytes = b"null") -> bytes:
        return self._frame.chunk(
            b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (choice.index, delta, logprobs, finish)
        )

    def _delta(self, event: Event) -> bytes | None:
        match event:
            case Content(text):
                return b'{"content":' + msgspec.json.encode(text) + b"}"
            case Reasoning(text):
                quoted = msgspec.json.encode(text)
                return b'{"reasoning":' + quoted + b',"reasoning_content":' + quoted + b"}"
            case CallBegun(index, name):
                call = _ToolCall(self._parsing.dialect.call_id(), _Function(name, ""))
                return b'{"tool_calls":[{"index":%d,%b]}' % (index, msgspec.json.encode(call)[1:])
            case CallArguments(index, text):
                quoted = msgspec.json.encode(text)
                return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (index, quoted)
            case CallEnded():
                return None

    def _message(self, events: Sequence[Event]) -> _Message:
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[_ToolCall] = []
        for event in events:
            match event:
                case Content(text):
                    content.append(text)
                case Reasoning(text):
                    reasoning.append(text)
                case CallBegun(_, name):
                    calls.append(_ToolCall(self._parsing.dialect.call_id(), _Function(name, "")))
                case CallArguments(index, text):
                    calls[index].function.arguments += text
        thought = "".join(reasoning)
        return _Message(
            role="assistant",
            content="".join(content) or (None if calls or thought else ""),
            refusal=None,
            reasoning=thought,
            reasoning_content=thought,
            tool_calls=calls,
        )

    def _finish(self, finish: pb.Finish.ValueType, parser: AnswerParser) -> str:
        """Of an answer that was told which tool to call, OpenAI says that it stopped."""
        if finish == pb.FINISH_STOP and parser.calls and not self._parsing.named:
            return "tool_calls"
        return FINISH_REASONS[finish]

    def _take_logprobs(self, streamed: _Streamed) -> bytes:
        if not self._logprobs or not streamed.logprobs:
            return b"null"
        logprobs, streamed.logprobs = streamed.logprobs, []
        return msgspec.json.encode(self._content(logprobs))
