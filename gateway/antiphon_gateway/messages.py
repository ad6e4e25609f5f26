"""POST /v1/messages: an answer as Anthropic's content blocks, streamed or whole.

The request goes through chat's own parts (`messages_prompt` turns it into one), and what the answer's text turns out to
be is told by the same events (`tools`): prose is a text block, reasoning a thinking block, a call a tool_use block. A
block ends where another kind begins. A stream ends with message_stop, or with an event `error`.
"""

from __future__ import annotations

import msgspec
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway import chat
from antiphon_gateway.flight import Choice, Flight, Target
from antiphon_gateway.messages_blocks import Block, TextBlock, ThinkingBlock, ToolUseBlock, blocks_of
from antiphon_gateway.messages_body import CountBody, MessageBody, unsupported
from antiphon_gateway.messages_prompt import to_chat
from antiphon_gateway.parameters import unknown_fields
from antiphon_gateway.tokenization import TextWorkers
from antiphon_gateway.tools import (
    AnswerParser,
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Dialect,
    Event,
    Parsing,
    Reasoning,
)

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_START = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
)


class Counted(msgspec.Struct):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class _Usage(msgspec.Struct):
    """`input_tokens` are those that are neither written to nor read from a cache: the three add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(msgspec.Struct):
    """The answer of /v1/messages."""

    id: str
    type: str
    role: str
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: _Usage


def check_model(body: CountBody, dialect: Dialect, target: Target) -> None:
    """What this model cannot do. Raises ApiError (400)."""
    if body.thinking is not None and body.thinking.type == "enabled" and dialect.reasoning is None:
        raise unsupported("thinking", f"the model {target.name!r} is not known to think; leave it out.")


def ignored_by(raw: bytes, body: CountBody, target: Target) -> tuple[str, ...]:
    """Fields that have no effect: unknown ones, and those that this model's chat template has no word for."""
    names = unknown_fields(raw, type(body)) if body.wide else ()
    template, config = target.model.template, body.output_config
    if config is not None and config.effort is not None and template is not None:
        names += () if "reasoning_effort" in template.source else ("output_config.effort",)
    return names


def complete_sampling(sampling: pb.Sampling, body: MessageBody) -> None:
    """What chat was not told. It has given the answer the rest of the context: no more than that is an error here."""
    sampling.max_tokens = min(sampling.max_tokens, body.max_tokens)
    sampling.stop.extend(body.stop_sequences or ())


async def count_tokens(
    body: CountBody, dialect: Dialect, target: Target, workers: TextWorkers, body_bytes: int
) -> Counted:
    """With a checked body. Raises ApiError (400)."""
    check_model(body, dialect, target)
    prompt = await chat.make_prompt(to_chat(body), target, workers, body_bytes)
    return Counted(len(prompt.token_ids))


class MessageRenderer:
    """A `Renderer`."""

    def __init__(
        self, answer_id: str, body: MessageBody, target: Target, parsing: Parsing | None, max_tokens: int
    ) -> None:
        """`max_tokens`: what the answer may have (`complete_sampling`)."""
        self._id = answer_id
        self._name = target.name
        self._stops = frozenset(body.stop_sequences or ())
        self._parsing = parsing
        self._parser = _parser(parsing)
        self._context_limits = max_tokens < body.max_tokens
        self._begun = False
        self._blocks = 0
        """How many have begun."""
        self._open: type[Event] | None = None
        """What the block that is not closed yet is made of."""

    # -- streamed

    def take(self, choice: Choice, step: pb.RequestStep) -> bytes:
        if not (step.text or step.finish or step.token_ids):
            return b""
        out = b""
        if not self._begun:
            self._begun = True
            message = msgspec.json.encode(self._message([], None, None, self._usage(choice.flight, 0)))
            out = b'event: message_start\ndata: {"type":"message_start","message":' + message + b"}\n\n" + _PING
        events = self._parser.push(step.text)
        if step.finish:
            events += self._parser.end()
        for event in events:
            out += self._told(event)
        return out + self._close() if step.finish else out

    def end(self, flight: Flight) -> bytes:
        reason, stop_sequence = self._stop(flight.choices[0], self._parser)
        delta = {"stop_reason": reason, "stop_sequence": stop_sequence}
        usage = self._usage(flight, flight.completion_tokens)
        return (
            b'event: message_delta\ndata: {"type":"message_delta","delta":%b,"usage":%b}\n\n'
            b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
            % (msgspec.json.encode(delta), msgspec.json.encode(usage))
        )

    def _told(self, event: Event) -> bytes:
        match event:
            case Content(text):
                return self._begin(event, TextBlock("")) + self._delta(b"text_delta", b"text", text)
            case Reasoning(text):
                return self._begin(event, ThinkingBlock("", "")) + self._delta(b"thinking_delta", b"thinking", text)
            case CallBegun(_, name):
                return self._begin(event, ToolUseBlock(self._call_id(), name, {}))
            case CallArguments(_, text):
                return self._delta(b"input_json_delta", b"partial_json", text)
            case CallEnded():
                return self._close()

    def _begin(self, event: Event, block: Block) -> bytes:
        """Nothing, where the block that is open goes on."""
        if self._open is type(event) and not isinstance(event, CallBegun):
            return b""
        closed = self._close()
        self._open = type(event)
        self._blocks += 1
        return closed + _START % (self._blocks - 1, msgspec.json.encode(block))

    def _delta(self, kind: bytes, field: bytes, text: str) -> bytes:
        return _DELTA % (self._blocks - 1, kind, field, msgspec.json.encode(text))

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._delta(b"signature_delta", b"signature", self._id) if self._open is Reasoning else b""
        self._open = None
        return signed + b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n' % (
            self._blocks - 1
        )

    # -- whole

    def whole(self, flight: Flight) -> bytes:
        choice = flight.choices[0]
        parser = _parser(self._parsing)
        events = [*parser.push("".join(choice.texts)), *parser.end()]
        reason, stop_sequence = self._stop(choice, parser)
        content = blocks_of(events, call_id=self._call_id, signature=self._id)
        usage = self._usage(flight, flight.completion_tokens)
        return msgspec.json.encode(self._message(content, reason, stop_sequence, usage))

    # -- both

    def _message(self, content: list[Block], reason: str | None, stop_sequence: str | None, usage: _Usage) -> Message:
        return Message(self._id, "message", "assistant", self._name, content, reason, stop_sequence, usage)

    def _stop(self, choice: Choice, parser: AnswerParser) -> tuple[str, str | None]:
        """Why it ended, and with which of the client's stop sequences."""
        if choice.finish == pb.FINISH_LENGTH:
            return ("model_context_window_exceeded" if self._context_limits else "max_tokens"), None
        if choice.stop_reason in self._stops:
            return "stop_sequence", choice.stop_reason
        return ("tool_use" if parser.calls else "end_turn"), None

    def _usage(self, flight: Flight, output_tokens: int) -> _Usage:
        cached_tokens = min(flight.prompt_tokens, flight.cached_tokens)
        return _Usage(flight.prompt_tokens - cached_tokens, 0, cached_tokens, output_tokens)

    def _call_id(self) -> str:
        assert self._parsing is not None
        call_id = self._parsing.dialect.call_id()
        return call_id.replace("call_", "toolu_", 1)


def _parser(parsing: Parsing | None) -> AnswerParser:
    """`parsing` None: answers are text and nothing else."""
    return AnswerParser(None, None, one_call=False, with_reasoning=True) if parsing is None else parsing.parser()
