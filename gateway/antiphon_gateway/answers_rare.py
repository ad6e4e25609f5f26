"""What few requests want told beside an answer: token ids, usage with each chunk, the message that it goes on with.

vLLM's `return_token_ids`, `stream_options.continuous_usage_stats` and chat's `echo`. A renderer around another one adds
them to what that one has made, so that answers without any of it are made as if there were none.

In a stream, `prompt_token_ids` come with the first chunk of each choice. `token_ids` are those since the choice's chunk
before: ids whose text is held back are told with the next text.
"""

from __future__ import annotations

from typing import Any

import msgspec
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.answers import Renderer
from antiphon_gateway.continuing import text_of
from antiphon_gateway.flight import Choice, Flight
from antiphon_gateway.schema import ChatBody, CommonBody

_CHOICES = b'"choices":['
_END = b"\n\n"


class _Counted(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Streamed:
    """Of one choice."""

    __slots__ = ("begun", "completion_tokens", "pending")

    def __init__(self) -> None:
        self.begun = False
        self.completion_tokens = 0
        self.pending: list[int] = []
        """Ids that no chunk has told yet."""


def with_more(renderer: Renderer, body: CommonBody, *, ids_may_be_told: bool = True) -> Renderer:
    """The renderer itself, where the body asks for nothing that is rare. `ids_may_be_told`: nothing is left out of the
    answer that they would give away."""
    options = body.stream_options
    counts = options is not None and bool(options.continuous_usage_stats)
    if not counts and not body.wide:
        return renderer
    echo = text_of(body.messages[-1]) if isinstance(body, ChatBody) and body.echo and _is_answered(body) else ""
    with_ids = bool(body.return_token_ids) and ids_may_be_told
    if not (counts or echo or with_ids):
        return renderer
    return FullerRenderer(
        renderer,
        is_chat=isinstance(body, ChatBody),
        with_ids=with_ids,
        counts=counts,
        include_usage=options is not None and bool(options.include_usage),
        echo=echo,
    )


def _is_answered(body: ChatBody) -> bool:
    """The last message has the role that the answer has."""
    return body.messages[-1].get("role") == "assistant"


class FullerRenderer:
    """A `Renderer` around another one of chat or completions."""

    def __init__(
        self, inner: Renderer, *, is_chat: bool, with_ids: bool, counts: bool, include_usage: bool, echo: str
    ) -> None:
        """`counts`: usage so far goes with each chunk. `echo`: what stands before the answer."""
        self._inner = inner
        self._is_chat = is_chat
        self._with_ids = with_ids
        self._counts = counts
        self._tail = b'}],"usage":null}' if include_usage else b"}]}"
        """What each of the inner one's chunks ends with."""
        self._echo = echo
        self._streamed: dict[int, _Streamed] = {}

    def take(self, choice: Choice, step: pb.RequestStep) -> bytes:
        streamed = self._streamed.get(choice.index)
        if streamed is None:
            streamed = self._streamed[choice.index] = _Streamed()
        told = streamed.completion_tokens
        streamed.completion_tokens += len(step.token_ids)
        if self._with_ids:
            streamed.pending += step.token_ids
        chunks = self._inner.take(choice, step).split(_END)[:-1]
        if not chunks:
            return b""
        out: list[bytes] = []
        last = len(chunks) - 1
        for place, chunk in enumerate(chunks):
            begins = not streamed.begun
            streamed.begun = True
            ends = place == last
            ids: list[int] | None = None
            if self._with_ids and (ends or not (self._is_chat and begins)):
                # The chunk that says the role has none.
                ids, streamed.pending = streamed.pending, []
            # The chunk that only says the role brings no token; text and its finish reason may be two chunks.
            says_the_role = self._is_chat and begins and not ends
            count = told if says_the_role else streamed.completion_tokens
            out.append(self._more(chunk, choice, count, ids, begins=begins))
            if begins and self._echo:
                out.append(self._more(self._echoed(chunk, choice), choice, count, None, begins=False))
        return b"".join(out)

    def _more(self, chunk: bytes, choice: Choice, count: int, ids: list[int] | None, *, begins: bool) -> bytes:
        """`ids`: None where the chunk tells none."""
        of_choice = b"" if ids is None else b',"token_ids":' + msgspec.json.encode(ids)
        of_chunk = b""
        if begins and self._with_ids:
            prompt_ids = b',"prompt_token_ids":' + msgspec.json.encode(choice.prompt.token_ids)
            if self._is_chat:
                of_chunk = prompt_ids
            else:
                of_choice += prompt_ids
        tail = self._tail[1:-1]
        if self._counts:
            prompt_tokens = len(choice.prompt.token_ids)
            usage = _Counted(prompt_tokens, count, prompt_tokens + count)
            tail = b'],"usage":' + msgspec.json.encode(usage)
        return chunk.removesuffix(self._tail) + of_choice + b"}" + tail + of_chunk + b"}" + _END

    def _echoed(self, first: bytes, choice: Choice) -> bytes:
        """A chunk of the stream that this is the first one of."""
        head, found, _ = first.partition(_CHOICES)
        text = msgspec.json.encode(self._echo)
        told = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null' % (choice.index, text)
        return head + found + told + self._tail

    def end(self, flight: Flight) -> bytes:
        return self._inner.end(flight)

    def whole(self, flight: Flight) -> bytes:
        answer: dict[str, Any] = msgspec.json.decode(self._inner.whole(flight))
        for told, choice in zip(answer["choices"], flight.choices, strict=True):
            if self._echo:
                told["message"]["content"] = self._echo + (told["message"]["content"] or "")
            if self._with_ids:
                told["token_ids"] = choice.output
                if not self._is_chat:
                    told["prompt_token_ids"] = choice.prompt.token_ids
        if self._with_ids and self._is_chat:
            answer["prompt_token_ids"] = flight.choices[0].prompt.token_ids
        return msgspec.json.encode(answer)
