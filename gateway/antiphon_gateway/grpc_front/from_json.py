"""From the JSON of an answer, or of an event of a stream, to the message that a call answers with.

Names are the same on both sides, so a message is made of the decoded object as it is; the functions here mend what has
another form: log-probabilities, and what JSON says twice. A name that the message does not have is left out, and logged
once: that is a field which HTTP was given and gRPC was not.
"""

from __future__ import annotations

import base64
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
from antiphon_proto import inference_pb2 as api
from google.protobuf import json_format
from google.protobuf.message import Message

log = logging.getLogger("antiphon.gateway")

Maker: TypeAlias = Callable[[bytes], Message]
"""Makes the message of an answer's JSON."""

_Object: TypeAlias = dict[str, Any]
_EVENT = b"data: "
_DONE = b"[DONE]"


def events_of(data: bytes) -> list[bytes]:
    """The JSON of each event among these bytes of a stream. Its end has none, and neither has a comment."""
    payloads = (event[len(_EVENT) :] for event in data.split(b"\n\n") if event.startswith(_EVENT))
    return [payload for payload in payloads if payload != _DONE]


def _maker(kind: type[Message], mend: Callable[[_Object], None]) -> Maker:
    def make(data: bytes) -> Message:
        answer: _Object = msgspec.json.decode(data)
        answer.pop("object", None)
        mend(answer)
        try:
            return kind(**answer)
        except ValueError as error:
            _tell(str(error))
            return json_format.ParseDict(_without_bytes(answer), kind(), ignore_unknown_fields=True)

    return make


@functools.lru_cache(maxsize=64)
def _tell(what: str) -> None:
    log.error("an answer has a field that the gRPC message lacks, and goes without it: %s", what)


def _without_bytes(value: Any) -> Any:
    """In protobuf's own JSON, bytes are text in base64."""
    if isinstance(value, dict):
        return {key: _without_bytes(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_bytes(inner) for inner in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


# ------------------------------------------------------------------ what has another form


def _mend_nothing(answer: _Object) -> None:
    pass


def _mend_prompt_logprobs(holder: _Object) -> None:
    told = holder.get("prompt_logprobs")
    if told is not None:
        holder["prompt_logprobs"] = [
            {"candidates": [{"token_id": int(token_id), **of_token} for token_id, of_token in (entry or {}).items()]}
            for entry in told
        ]


def _mend_chat(answer: _Object) -> None:
    _mend_prompt_logprobs(answer)
    for choice in answer["choices"]:
        said = choice.get("delta")
        if said is None:
            said = choice["message"]
        # Always null, and the same text by an older name.
        said.pop("refusal", None)
        said.pop("reasoning_content", None)
        logprobs = choice["logprobs"]
        if logprobs is not None:
            logprobs.pop("refusal", None)
            for token in logprobs["content"]:
                token["bytes"] = bytes(token["bytes"])
                for top in token["top_logprobs"]:
                    top["bytes"] = bytes(top["bytes"])


def _mend_completion(answer: _Object) -> None:
    for choice in answer["choices"]:
        _mend_prompt_logprobs(choice)
        logprobs = choice["logprobs"]
        if logprobs is not None:
            choice["logprobs"] = [
                {
                    "token": token,
                    "logprob": logprob,
                    "text_offset": offset,
                    "top_logprobs": [{"token": other, "logprob": value} for other, value in (top or {}).items()],
                }
                for token, logprob, offset, top in zip(
                    logprobs["tokens"],
                    logprobs["token_logprobs"],
                    logprobs["text_offset"],
                    logprobs["top_logprobs"],
                    strict=True,
                )
            ]


def _mend_models(answer: _Object) -> None:
    for model in answer["data"]:
        model.pop("object", None)


def _mend_count(answer: _Object) -> None:
    answer.pop("tokens", None)
    answer.pop("token_strs", None)


chat = _maker(api.ChatCompletionResponse, _mend_chat)
chat_chunk = _maker(api.ChatCompletionChunk, _mend_chat)
completion = _maker(api.CompletionResponse, _mend_completion)
completion_chunk = _maker(api.CompletionChunk, _mend_completion)
models = _maker(api.ListModelsResponse, _mend_models)
model = _maker(api.Model, _mend_nothing)
tokenized = _maker(api.TokenizeResponse, _mend_nothing)
counted = _maker(api.CountTokensResponse, _mend_count)
detokenized = _maker(api.DetokenizeResponse, _mend_nothing)
