"""Bodies of OpenAI's Responses API: what is read of them, and what is refused.

Items of the input are read one by one (`responses_prompt`), so that a refusal can say which one is at fault. Fields
that are not known are accepted and named in a header, as everywhere (`parameters`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from antiphon_gateway.errors import ApiError, invalid

MAX_METADATA = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 512

_REFUSED = {
    "background": "an answer is made while its client waits; leave it out.",
    "conversation": "there are no conversations of their own; use previous_response_id, or send all items.",
    "prompt": "there are no stored prompts; send instructions and input.",
    "context_management": "the context is not edited here; leave it out.",
    "moderation": "nothing is moderated here; leave it out.",
    "top_logprobs": "answers of this endpoint have no log-probabilities; /v1/chat/completions has.",
}
"""What asks for something that is not here, and what to do instead."""


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponseBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    wide: ClassVar[bool] = False
    nested: ClassVar[dict[str, type[msgspec.Struct]]] = {
        "text": TextConfig,
        "reasoning": Reasoning,
        "stream_options": StreamOptions,
    }

    model: str
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    include: list[str] | None = None
    service_tier: str | None = None
    # Beyond OpenAI's, as for chat.
    seed: int | None = None
    top_k: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Without effect: users are told apart by their keys, a cache is found by the prompt itself, and of the tools that
    # the limit counts there are none.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: int | None = None
    # Refused where they ask for anything.
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: list[Any] | None = None
    moderation: dict[str, Any] | None = None
    top_logprobs: int | None = None


def unsupported(param: str, why: str) -> ApiError:
    return invalid(f"{param}: {why}", param=param, code="unsupported_parameter")


def check_response(body: ResponseBody, *, can_store: bool) -> None:
    """All but the items and what chat checks. Raises ApiError (400)."""
    for name, why in _REFUSED.items():
        if getattr(body, name):
            raise unsupported(name, why)
    if body.input is None:
        raise invalid("The parameter input is missing.", param="input", code="missing_parameter")
    if body.truncation == "auto":
        raise unsupported("truncation", "conversations are not cut here; send fewer items, or 'disabled'.")
    for name in body.include or ():
        if name == "reasoning.encrypted_content":
            raise unsupported("include", "reasoning is told as text in its item's content; send that back instead.")
        raise unsupported("include", f"{name[:100]!r} is nothing that answers have here; leave it out.")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity", "models here have no such dial; say it in the instructions.")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "events are as long as their text.")
    if body.max_output_tokens is not None and not 1 <= body.max_output_tokens < 2**31:
        raise invalid("max_output_tokens must be from 1 to 2147483647.", param="max_output_tokens", code="out_of_range")
    if body.store and not can_store:
        raise unsupported("store", "this gateway keeps no answers (--responses-stored); leave it out, or send false.")
    _check_metadata(body.metadata or {})


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise invalid(f"metadata may have {MAX_METADATA} entries, not {len(metadata)}.", param="metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARACTERS or len(value) > MAX_METADATA_VALUE_CHARACTERS:
            raise invalid(
                f"metadata: keys may have {MAX_METADATA_KEY_CHARACTERS} characters and values"
                f" {MAX_METADATA_VALUE_CHARACTERS}.",
                param="metadata",
            )
