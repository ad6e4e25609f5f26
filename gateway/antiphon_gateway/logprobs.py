"""Log-probabilities in OpenAI's two shapes: `content` lists for chat, parallel lists for completions.

JSON has no infinity: what is below `LOWEST` (a token that a filter or a bias made impossible) is given as that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.models import Prompt
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
    token_logprobs: list[float | None]
    """None: of a prompt's first token."""
    top_logprobs: list[dict[str, float] | None]
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


def with_prompt(
    codec: TokenCodec,
    prompt: Prompt,
    scores: Sequence[pb.TokenLogprob],
    answer: CompletionLogprobs,
    top: int,
    *,
    as_ids: bool = False,
) -> CompletionLogprobs:
    """The prompt's tokens before the answer's. `scores`: of those from the second on. Special tokens may have no place
    in the text that is echoed, so no offset goes beyond it."""
    rest, _ = completion_logprobs(codec, scores, top, 0, as_ids=as_ids)
    first = codec.token(prompt.token_ids[0]).text
    shift, end = len(first), len(prompt.text)
    offsets = [0, *(min(offset + shift, end) for offset in rest.text_offset)]
    return CompletionLogprobs(
        [_id_name(prompt.token_ids[0]) if as_ids else first, *rest.tokens, *answer.tokens],
        [None, *rest.token_logprobs, *answer.token_logprobs],
        [None, *rest.top_logprobs, *answer.top_logprobs],
        [*offsets, *answer.text_offset],
    )


def finite(logprob: float) -> float:
    return LOWEST if math.isnan(logprob) else max(LOWEST, min(0.0, logprob))
