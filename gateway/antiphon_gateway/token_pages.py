"""POST /tokenize and /detokenize, as vLLM's server has them: what a text is in tokens, and tokens in text.

They say what the gateway itself would send to a worker: the same tokenizer, the same template, the same special tokens.
No worker is asked, so they answer also while the model's workers are away, once its card is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from antiphon_gateway import chat, errors
from antiphon_gateway.flight import Target
from antiphon_gateway.models import Model
from antiphon_gateway.schema import ChatBody, CommonBody, check_token_ids, decode
from antiphon_gateway.tokenization import IDS_PER_CHARACTER, TextWorkers


class TextBody(CommonBody, kw_only=True):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokensBody(CommonBody, kw_only=True):
    tokens: list[int]


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


@dataclass(frozen=True, slots=True)
class ToTokenize:
    """A body that was read: a text, or messages for the chat template."""

    model: str
    text: str | None
    chat: ChatBody | None
    add_special_tokens: bool
    with_texts: bool


def read_tokenize(raw: bytes) -> ToTokenize:
    """Raises ApiError (400)."""
    body = decode(raw, TextBody)
    if (body.prompt is None) == (body.messages is None):
        raise errors.invalid("Give either prompt (a text) or messages (a chat).", param="prompt")
    return ToTokenize(
        model=body.model,
        text=body.prompt,
        chat=decode(raw, ChatBody) if body.messages is not None else None,
        # A template writes its special tokens itself.
        add_special_tokens=body.add_special_tokens is not False,
        with_texts=bool(body.return_token_strs),
    )


async def tokenize(asked: ToTokenize, target: Target, workers: TextWorkers, body_bytes: int) -> Tokenized:
    """Raises ApiError (400)."""
    model = target.model
    if asked.chat is not None:
        if not asked.chat.messages:
            raise errors.invalid("messages is empty; at least one message is needed.", param="messages")
        if asked.chat.chat_template is not None:
            await chat.compile_template(asked.chat, target, workers)
        ids = (await chat.make_prompt(asked.chat, target, workers, body_bytes)).token_ids
    else:
        text = asked.text or ""
        ids = await workers.run(
            lambda: model.codec.encode(text, add_special_tokens=asked.add_special_tokens), characters=len(text)
        )
    texts = await _texts(ids, model, workers) if asked.with_texts else None
    return Tokenized(len(ids), target.max_context_tokens, ids, texts)


async def _texts(ids: Sequence[int], model: Model, workers: TextWorkers) -> list[str]:
    return await workers.run(
        lambda: [model.codec.token(token_id).text for token_id in ids], characters=len(ids) // IDS_PER_CHARACTER
    )


def read_detokenize(raw: bytes) -> tuple[str, list[int]]:
    """(model, ids). Raises ApiError (400)."""
    body = decode(raw, TokensBody)
    return body.model, body.tokens


async def detokenize(ids: list[int], model: Model, workers: TextWorkers) -> Detokenized:
    """With special tokens as their texts. Raises ApiError (400)."""
    check_token_ids(ids, model.vocab_size, "tokens")
    return Detokenized(await workers.run(lambda: model.codec.decode(ids), characters=len(ids)))
