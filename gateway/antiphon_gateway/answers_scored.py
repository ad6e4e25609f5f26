"""vLLM's `prompt_logprobs`: how likely each token of the prompt is, beside the answer.

A list with an entry for each token of the prompt: null for the first one, then an object of the token and the
alternatives that were asked for, by their ids (docs.vllm.ai/en/latest/api/vllm/logprobs.html). Completions have it in
each choice, chats once. In a stream it comes with the first chunk of the first choice of each prompt, as it was
computed for that one.

A renderer around another one adds it, so that all other answers are made as if there were none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.answers import Renderer
from antiphon_gateway.flight import Choice, Flight
from antiphon_gateway.logprobs import finite
from antiphon_gateway.schema import ChatBody, CommonBody
from antiphon_gateway.tokenization import TokenCodec

_CHUNK = b"data: {"
_CHOICE = b'"choices":[{'
_NAME = b'"prompt_logprobs":'


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


Entries = list[dict[int, PromptLogprob] | None]


def prompt_entries(codec: TokenCodec, told: Sequence[pb.TokenLogprob], top: int) -> Entries:
    """`told`: of the prompt's tokens from the second on."""
    entries: Entries = [None]
    for token in told:
        entry = {token.token_id: PromptLogprob(finite(token.logprob), token.rank, codec.token(token.token_id).text)}
        best = zip(token.top_ids[:top], token.top_logprobs[:top], strict=True)
        for rank, (token_id, logprob) in enumerate(best, start=1):
            entry.setdefault(token_id, PromptLogprob(finite(logprob), rank, codec.token(token_id).text))
        entries.append(entry)
    return entries


def with_scores(renderer: Renderer, body: CommonBody, codec: TokenCodec) -> Renderer:
    """The renderer itself, where the body does not ask for them."""
    if body.prompt_logprobs is None:
        return renderer
    return ScoredRenderer(renderer, codec, body.prompt_logprobs, is_chat=isinstance(body, ChatBody))


class ScoredRenderer:
    """A `Renderer` around another one of chat or completions."""

    def __init__(self, inner: Renderer, codec: TokenCodec, top: int, *, is_chat: bool) -> None:
        self._inner = inner
        self._codec = codec
        self._top = top
        self._is_chat = is_chat
        self._begun: set[int] = set()

    def take(self, choice: Choice, step: pb.RequestStep) -> bytes:
        data = self._inner.take(choice, step)
        if not data or choice.index in self._begun:
            return data
        self._begun.add(choice.index)
        if choice.prompt_logprobs is None:
            return data
        told = _NAME + self._entries(choice.prompt_logprobs) + b","
        if self._is_chat:
            return data.replace(_CHUNK, _CHUNK + told, 1)
        return data.replace(_CHOICE, _CHOICE + told, 1)

    def end(self, flight: Flight) -> bytes:
        return self._inner.end(flight)

    def whole(self, flight: Flight) -> bytes:
        answer: dict[str, Any] = msgspec.json.decode(self._inner.whole(flight))
        if self._is_chat:
            answer["prompt_logprobs"] = msgspec.Raw(self._entries(flight.scores_of(flight.choices[0])))
            return msgspec.json.encode(answer)
        entries: dict[int, msgspec.Raw] = {}
        for told, choice in zip(answer["choices"], flight.choices, strict=True):
            scores = flight.scores_of(choice)
            if id(scores) not in entries:
                entries[id(scores)] = msgspec.Raw(self._entries(scores))
            told["prompt_logprobs"] = entries[id(scores)]
        return msgspec.json.encode(answer)

    def _entries(self, told: Sequence[pb.TokenLogprob]) -> bytes:
        return msgspec.json.encode(prompt_entries(self._codec, told, self._top))
