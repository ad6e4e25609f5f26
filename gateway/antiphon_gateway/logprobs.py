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


def chat_logprobs(
    codec: TokenCodec, tokens: Sequence[pb.TokenLogprob], top: int, *, as_ids: bool = False
) -> list[ContentLogprob]:
    """One entry per token, each with the `top` most likely tokens at its place. `as_ids`: tokens are called by them."""
    return [_content(codec, token, top, as_ids) for token in tokens]


def _content(codec: TokenCodec, token: pb.TokenLogprob, top: int, as_ids: bool) -> ContentLogprob:
    chosen = codec.token(token.token_id)
    best = [
        TopLogprob(_id_name(token_id) if as_ids else text.text, finite(logprob), list(text.data))
        for token_id, logprob in list(zip(token.top_ids, token.top_logprobs, strict=False))[:top]
        for text in (codec.token(token_id),)
    ]
    name = _id_name(token.token_id) if as_ids else chosen.text
    return ContentLogprob(name, finite(token.logprob), list(chosen.data), best)


def _id_name(token_id: int) -> str:
    """As vLLM names tokens where `return_tokens_as_token_ids` is asked for."""
    return f"token_id:{token_id}"


def completion_logprobs(
    codec: TokenCodec, tokens: Sequence[pb.TokenLogprob], top: int, offset: int, *, as_ids: bool = False
) -> tuple[CompletionLogprobs, int]:
    """Parallel lists, the first token at character `offset` of the text; and the offset of what comes next. `as_ids`:
    tokens are called by their ids."""
    lists = CompletionLogprobs([], [], [], [])
    for token in tokens:
        text = codec.token(token.token_id).text
        name = _id_name(token.token_id) if as_ids else text
        best = {
            _id_name(token_id) if as_ids else codec.token(token_id).text: finite(logprob)
            for token_id, logprob in list(zip(token.top_ids, token.top_logprobs, strict=False))[:top]
        }
        best.setdefault(name, finite(token.logprob))
        lists.tokens.append(name)
        lists.token_logprobs.append(finite(token.logprob))
        lists.top_logprobs.append(best)
        lists.text_offset.append(offset)
        offset += len(text)
    return lists, offset


def finite(logprob: float) -> float:
    return LOWEST if math.isnan(logprob) else max(LOWEST, min(0.0, logprob))
