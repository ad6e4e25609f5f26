"""Log-probabilities in OpenAI's two shapes: `content` lists for chat, parallel lists for completions.

JSON has no infinity: what is below `LOWEST` (a token that a filter or a bias made impossible) is given as that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.tokenization import TokenCodec

LOWEST = -9999.0


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def chat_logprobs(codec: TokenCodec, tokens: Sequence[pb.TokenLogprob], top: int) -> list[ContentLogprob]:
    """One entry per token, each with the `top` most likely tokens at its place."""
    return [_content(codec, token, top) for token in tokens]


def _content(codec: TokenCodec, token: pb.TokenLogprob, top: int) -> ContentLogprob:
    chosen = codec.token(token.token_id)
    best = [
        TopLogprob(text.text, finite(logprob), list(text.data))
        for token_id, logprob in list(zip(token.top_ids, token.top_logprobs, strict=False))[:top]
        for text in (codec.token(token_id),)
    ]
    return ContentLogprob(chosen.text, finite(token.logprob), list(chosen.data), best)


def completion_logprobs(
    codec: TokenCodec, tokens: Sequence[pb.TokenLogprob], top: int, offset: int
) -> tuple[CompletionLogprobs, int]:
    """Parallel lists, the first token at character `offset` of the text; and the offset of what comes next."""
    lists = CompletionLogprobs([], [], [], [])
    for token in tokens:
        text = codec.token(token.token_id).text
        best = {
            codec.token(token_id).text: finite(logprob)
            for token_id, logprob in list(zip(token.top_ids, token.top_logprobs, strict=False))[:top]
        }
        best.setdefault(text, finite(token.logprob))
        lists.tokens.append(text)
        lists.token_logprobs.append(finite(token.logprob))
        lists.top_logprobs.append(best)
        lists.text_offset.append(offset)
        offset += len(text)
    return lists, offset


def finite(logprob: float) -> float:
    return LOWEST if math.isnan(logprob) else max(LOWEST, min(0.0, logprob))
