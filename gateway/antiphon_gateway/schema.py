"""Request bodies: what is read of them, what is refused, and which parameter a refusal names.

msgspec decodes and checks types; the functions here check ranges and combinations. A null is the same as an absent
field. Fields that are not known are accepted, as OpenAI clients send more than any server knows, and named in a header
(`parameters`); fields that ask for something that cannot be done are refused, never ignored.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar, cast

import msgspec

from antiphon_gateway.errors import ApiError, invalid
from antiphon_gateway.parameters import Endpoint, check_rare, unsupported, wide
from antiphon_gateway.wire_ids import WireIds

MAX_CHOICES = 16
MAX_PROMPTS = 256
MAX_CHOICES_IN_ALL = 256
"""Prompts times `n`."""
MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_CACHE_SALT_CHARACTERS = 1024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 64


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """As vLLM names them (`structured`)."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class CommonBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and completions have in common. What else a body has makes it a wide one (`parameters`)."""

    wide: ClassVar[bool] = False
    endpoint: ClassVar[Endpoint | None] = None
    nested: ClassVar[dict[str, type[msgspec.Struct]]] = {"stream_options": StreamOptions}

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    response_format: dict[str, Any] | None = None
    # Beyond OpenAI's, as other servers name them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # How it is to be treated (`wishes`).
    service_tier: str | None = None
    priority: int | None = None
    # Fields of wide bodies only.
    truncate_prompt_tokens: ClassVar[int | None] = None
    truncation_side: ClassVar[str | None] = None
    return_token_ids: ClassVar[bool | None] = None
    return_tokens_as_token_ids: ClassVar[bool | None] = None
    spaces_between_special_tokens: ClassVar[bool | None] = None
    cache_salt: ClassVar[str | None] = None
    allowed_token_ids: ClassVar[list[int] | None] = None
    bad_words: ClassVar[list[str] | None] = None
    prompt_logprobs: ClassVar[int | None] = None


class ChatBody(CommonBody, kw_only=True):
    endpoint: ClassVar[Endpoint | None] = Endpoint.CHAT

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    # Fields of wide bodies only.
    add_special_tokens: ClassVar[bool | None] = None
    chat_template: ClassVar[str | None] = None
    documents: ClassVar[list[dict[str, Any]] | None] = None
    echo: ClassVar[bool | None] = None


class CompletionBody(CommonBody, kw_only=True):
    endpoint: ClassVar[Endpoint | None] = Endpoint.COMPLETIONS

    prompt: str | list[str | int | list[int]] | None = None
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None
    # Fields of wide bodies only.
    add_special_tokens: ClassVar[bool | None] = None


_Body = TypeVar("_Body", bound=msgspec.Struct)
_AT = re.compile(r"^(.*) - at `(?:key in )?\$\.?([^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `([^`]*)`")
_UNKNOWN = "contains unknown field"
_WRITABLE = 1e300


def decode(raw: bytes, kind: type[_Body]) -> _Body:
    """The body as a record. Raises ApiError (400), naming the parameter where one is at fault."""
    if raw.startswith(b"\xef\xbb\xbf"):
        raw = raw[3:]
    try:
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError as error:
            if _UNKNOWN not in str(error):
                raise
        return cast(_Body, msgspec.json.decode(raw, type=wide(kind)))
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not JSON in UTF-8: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise invalid("The body is nested too deeply.", code="invalid_json") from error


def _refusal(message: str) -> ApiError:
    missing, match = _MISSING.search(message), _AT.match(message)
    if missing:
        param = f"{match[2]}.{missing[1]}" if match is not None and match[2] else missing[1]
        return invalid(f"The parameter {param} is missing.", param=param, code="missing_parameter")
    if match is None:
        return invalid(f"The body does not have the right form: {message}.")
    param = match[2].removesuffix("[...]")
    return invalid(f"{param}: {match[1][:1].lower()}{match[1][1:]}.", param=param or None, code="invalid_type")


def check_common(body: CommonBody) -> None:
    """Ranges of everything that needs neither the model nor the prompt. Raises ApiError (400)."""
    _within(body.n, 1, MAX_CHOICES, "n")
    _within(body.temperature, 0.0, 2.0, "temperature")
    _within(body.top_p, 0.0, 1.0, "top_p")
    _within(body.min_p, 0.0, 1.0, "min_p")
    _within(body.presence_penalty, -2.0, 2.0, "presence_penalty")
    _within(body.frequency_penalty, -2.0, 2.0, "frequency_penalty")
    _within(body.top_k, -1, 2**31 - 1, "top_k")
    _within(body.seed, -(2**63), 2**64 - 1, "seed")
    _within(body.min_tokens, 0, 2**31 - 1, "min_tokens")
    if body.repetition_penalty is not None and not 0.0 < body.repetition_penalty <= 100.0:
        raise invalid("repetition_penalty must be above 0 and at most 100.", param="repetition_penalty")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options can be used only with stream: true.", param="stream_options")
    if body.stream_options is not None:
        _check_stream_options(body.stream_options)
    if body.wide and body.endpoint is not None:
        check_rare(body, body.endpoint)
        _check_rare_ranges(body)
    stop_strings(body)
    if body.logit_bias is not None:
        if len(body.logit_bias) > MAX_LOGIT_BIAS:
            raise invalid(f"logit_bias may have {MAX_LOGIT_BIAS} entries.", param="logit_bias")
        for key, value in body.logit_bias.items():
            if not (key.isascii() and key.isdigit()):
                raise invalid(f"logit_bias: {key[:50]!r} is not a token id.", param="logit_bias")
            _within(value, -100.0, 100.0, "logit_bias")


def _check_stream_options(options: StreamOptions) -> None:
    if options.include_obfuscation:
        raise invalid(
            "stream_options.include_obfuscation is not supported: chunks are as long as their text.",
            param="stream_options.include_obfuscation",
            code="unsupported_parameter",
        )


def _check_rare_ranges(body: CommonBody) -> None:
    keep = body.truncate_prompt_tokens
    _within(keep, -1, 2**31 - 1, "truncate_prompt_tokens")
    if keep == 0:
        raise invalid("truncate_prompt_tokens 0 would leave no prompt.", param="truncate_prompt_tokens")
    if body.truncation_side not in (None, "left", "right"):
        raise invalid("truncation_side must be left or right.", param="truncation_side")
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MAX_CACHE_SALT_CHARACTERS:
        raise invalid(f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARACTERS} characters.", param="cache_salt")
    _within(body.prompt_logprobs, 0, MAX_TOP_LOGPROBS, "prompt_logprobs")
    if body.allowed_token_ids is not None and not 1 <= len(body.allowed_token_ids) <= MAX_ALLOWED_TOKEN_IDS:
        raise invalid(f"allowed_token_ids must have 1 to {MAX_ALLOWED_TOKEN_IDS} ids.", param="allowed_token_ids")
    words = body.bad_words or ()
    if len(words) > MAX_BAD_WORDS:
        raise invalid(f"bad_words may have {MAX_BAD_WORDS} texts, not {len(words)}.", param="bad_words")
    if any(not word.strip() or len(word) > MAX_BAD_WORD_CHARACTERS for word in words):
        raise invalid(
            f"A text of bad_words must have 1 to {MAX_BAD_WORD_CHARACTERS} characters, not all of them spaces.",
            param="bad_words",
        )


def check_chat(body: ChatBody) -> None:
    """What is chat's own. Raises ApiError (400)."""
    check_common(body)
    if not body.messages:
        raise invalid("messages is empty; at least one message is needed.", param="messages")
    _within(body.max_tokens, 1, 2**31 - 1, "max_tokens")
    _within(body.max_completion_tokens, 1, 2**31 - 1, "max_completion_tokens")
    _within(body.top_logprobs, 0, MAX_TOP_LOGPROBS, "top_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs can be used only with logprobs: true.", param="top_logprobs")
    if body.functions:
        raise unsupported("functions", Endpoint.CHAT)
    if body.audio is not None or (body.modalities is not None and body.modalities != ["text"]):
        raise unsupported("audio" if body.audio is not None else "modalities", Endpoint.CHAT)


def check_completion(body: CompletionBody) -> None:
    """What is completions' own. Raises ApiError (400)."""
    check_common(body)
    _within(body.max_tokens, 0, 2**31 - 1, "max_tokens")
    _within(body.logprobs, 0, MAX_TOP_LOGPROBS, "logprobs")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", Endpoint.COMPLETIONS)
    if body.suffix:
        raise unsupported("suffix", Endpoint.COMPLETIONS)


def stop_strings(body: CommonBody) -> list[str]:
    """The stop strings as a list. Raises ApiError (400)."""
    if body.stop is None:
        return []
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    if len(stop) > MAX_STOP_STRINGS:
        raise invalid(f"stop may have {MAX_STOP_STRINGS} strings, not {len(stop)}.", param="stop")
    if any(not text or len(text) > MAX_STOP_CHARACTERS for text in stop):
        raise invalid(f"A stop string must have 1 to {MAX_STOP_CHARACTERS} characters.", param="stop")
    return stop


def prompts(body: CompletionBody) -> list[str | list[int]]:
    """The prompts, each as text or as token ids. Raises ApiError (400)."""
    prompt = body.prompt
    if prompt is None:
        raise invalid("The parameter prompt is missing.", param="prompt", code="missing_parameter")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt is an empty list.", param="prompt")
    kind = type(prompt[0])
    if kind is int:
        # Whether all of them are ids is seen where they are packed (`packed_ids`): one pass, not two.
        return [cast(list[int], prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"prompt may have {MAX_PROMPTS} items, not {len(prompt)}.", param="prompt")
    if any(type(item) is not kind for item in prompt):
        raise _mixed()
    return cast(list[str | list[int]], prompt)


def _mixed() -> ApiError:
    return invalid("prompt mixes texts, token ids and lists of them; use one kind.", param="prompt")


def packed_ids(ids: Sequence[int], wire_ids: WireIds) -> tuple[array[int], bytes]:
    """A prompt's ids as 32-bit integers, and as they go to workers. Raises ApiError (400) where one is not in the
    vocabulary."""
    try:
        packed = array("I", ids)
        return packed, wire_ids.encoded(packed)
    except TypeError as error:
        raise _mixed() from error
    except (OverflowError, IndexError) as error:
        raise _not_in_vocabulary("prompt", wire_ids.vocab_size) from error


def _not_in_vocabulary(param: str, vocab_size: int) -> ApiError:
    return invalid(f"{param}: token ids must be from 0 to {vocab_size - 1}.", param=param)


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Every id must be in the vocabulary. Raises ApiError (400)."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise _not_in_vocabulary(param, vocab_size)


def _within(value: float | None, low: float, high: float, param: str) -> None:
    if value is not None and not low <= value <= high:
        # Numbers in JSON have no end, those that can be written with :g have.
        given = f"{value:g}" if abs(value) < _WRITABLE else "so large a number"
        raise invalid(f"{param} must be from {low:g} to {high:g}, not {given}.", param=param, code="out_of_range")
