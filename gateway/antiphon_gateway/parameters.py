"""Every parameter that this API knows, and what becomes of it: one table, for the code, for docs/api.md, for OpenAPI.

Three things may become of a parameter. It is honoured. It is refused with a 400 that says why, unless its value asks
for nothing (`harmless`). Or it is accepted without effect, because it cannot change the answer. What is in no row is
unknown: it is accepted too, and named in the header x-antiphon-ignored.

Fields of the bodies (`schema`) are what most requests use. The other rows are rare: a body that has one of them does
not decode as the plain record, which forbids unknown fields, and is decoded again as the `wide` one, which has them all
and forbids none. So they cost a plain request nothing. Rare ones that are honoured have a type here (`form`), and the
plain record says what it is where they are absent, as a class variable.
"""

from __future__ import annotations

import codecs
import functools
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, cast

import msgspec

from antiphon_gateway.errors import ApiError, invalid
from antiphon_gateway.http import Header

MAX_NAMES = 16
MAX_HEADER_BYTES = 512
_MORE = "..."


class Endpoint(Enum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class Standing(Enum):
    HONOURED = "honoured"
    REFUSED = "refused"
    WITHOUT_EFFECT = "accepted, without effect"


CHAT = (Endpoint.CHAT,)
COMPLETIONS = (Endpoint.COMPLETIONS,)
BOTH = (Endpoint.CHAT, Endpoint.COMPLETIONS)


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    endpoints: tuple[Endpoint, ...]
    standing: Standing
    sentence: str
    """What it does here; of a refused one, why not or what to do instead."""
    harmless: tuple[Any, ...] = ()
    """Of a refused one: values that ask for what happens anyway. A null always is one."""
    form: Any = None
    """Of a rare one that is honoured: its type."""


def _honoured(name: str, endpoints: tuple[Endpoint, ...], sentence: str) -> Parameter:
    return Parameter(name, endpoints, Standing.HONOURED, sentence)


def _rare(name: str, endpoints: tuple[Endpoint, ...], form: Any, sentence: str) -> Parameter:
    return Parameter(name, endpoints, Standing.HONOURED, sentence, form=form)


def _refused(name: str, endpoints: tuple[Endpoint, ...], sentence: str, *harmless: Any) -> Parameter:
    return Parameter(name, endpoints, Standing.REFUSED, sentence, harmless)


def _without_effect(name: str, endpoints: tuple[Endpoint, ...], sentence: str) -> Parameter:
    return Parameter(name, endpoints, Standing.WITHOUT_EFFECT, sentence)


PARAMETERS: tuple[Parameter, ...] = (
    # What is asked.
    _honoured("model", BOTH, "A name from /v1/models."),
    _honoured("messages", CHAT, "Text; parts of type text and refusal are joined, other parts are refused."),
    _honoured("prompt", COMPLETIONS, "A text, a list of texts, a list of token ids, or a list of such lists."),
    _honoured("n", BOTH, "1 to 16; the prompt is computed once, and the choices share its blocks."),
    _honoured("echo", COMPLETIONS, "The prompt's text comes before the answer; so do its logprobs."),
    # How it is answered.
    _honoured("stream", BOTH, "Server-sent events."),
    _honoured(
        "stream_options", BOTH, "include_usage and continuous_usage_stats (with each chunk); include_obfuscation false."
    ),
    _honoured("max_tokens", BOTH, "The most tokens of each choice."),
    _honoured("max_completion_tokens", CHAT, "Wins over max_tokens."),
    _honoured("logprobs", BOTH, "Of the answer's tokens; in completions a number up to 20."),
    _honoured("top_logprobs", CHAT, "0 to 20, with logprobs."),
    # Sampling.
    _honoured("temperature", BOTH, "0 to 2."),
    _honoured("top_p", BOTH, "0 to 1; 0 is the most likely token."),
    _honoured("top_k", BOTH, "-1 and 0: no limit."),
    _honoured("min_p", BOTH, "0 to 1."),
    _honoured("presence_penalty", BOTH, "-2 to 2."),
    _honoured("frequency_penalty", BOTH, "-2 to 2."),
    _honoured("repetition_penalty", BOTH, "Above 0, at most 100."),
    _honoured("logit_bias", BOTH, "Up to 1024 token ids of the vocabulary, -100 to 100."),
    _honoured("seed", BOTH, "The same request has the same answer on the same engine."),
    _honoured("stop", BOTH, "Up to 4 texts."),
    _honoured("stop_token_ids", BOTH, "Up to 256 ids."),
    _honoured("include_stop_str_in_output", BOTH, "The stop text stays in the answer."),
    _honoured("ignore_eos", BOTH, "The answer goes on to max_tokens."),
    _honoured("min_tokens", BOTH, "No end before so many tokens."),
    _honoured("skip_special_tokens", BOTH, "False: special tokens stay in the text."),
    _rare("allowed_token_ids", BOTH, list[int], "1 to 16384 ids: nothing else is sampled, no end token either."),
    _rare("bad_words", BOTH, list[str], "Up to 128 texts of up to 64 characters, whose tokens are never completed."),
    # What the answer has to be.
    _honoured("response_format", BOTH, "text, json_object or json_schema."),
    _honoured("structured_outputs", BOTH, "json, regex, choice, grammar or json_object."),
    _honoured("guided_json", BOTH, "The older name of structured_outputs.json."),
    _honoured("guided_regex", BOTH, "The older name of structured_outputs.regex."),
    _honoured("guided_choice", BOTH, "The older name of structured_outputs.choice."),
    _honoured("guided_grammar", BOTH, "The older name of structured_outputs.grammar."),
    _without_effect("guided_decoding_backend", BOTH, "There is one."),
    _refused("guided_whitespace_pattern", BOTH, "White space in structured output cannot be chosen; leave it out."),
    # Tools and reasoning.
    _honoured("tools", CHAT, "Functions, where the model's chat template has a place for them."),
    _honoured("tool_choice", CHAT, "Whether tools may, must or may not be called."),
    _honoured("parallel_tool_calls", CHAT, "False: one call at most."),
    _refused("functions", CHAT, "Use tools.", []),
    _refused("function_call", CHAT, "Use tools and tool_choice.", "none", "auto"),
    _honoured("include_reasoning", CHAT, "False: reasoning is left out of the answer."),
    _honoured(
        "reasoning_effort",
        CHAT,
        "Given to the chat template; named in x-antiphon-ignored where the template has no word for it.",
    ),
    _refused("thinking_token_budget", BOTH, "Reasoning has no budget of its own; bound the answer with max_tokens."),
    # The prompt's making.
    _honoured("chat_template_kwargs", CHAT, "Variables for the model's chat template."),
    _honoured("add_generation_prompt", CHAT, "False: the prompt ends with the last message."),
    _honoured(
        "continue_final_message", CHAT, "The answer goes on with the last message, which must be the assistant's."
    ),
    _rare(
        "chat_template",
        CHAT,
        str,
        "Instead of the model's own, up to 64 KiB, where the gateway runs with --trust-request-chat-template; else"
        " refused: see chat_template_kwargs.",
    ),
    _rare(
        "documents",
        CHAT,
        list[dict[str, Any]],
        "Given to the chat template; named in x-antiphon-ignored where the template has no word for them.",
    ),
    _rare("echo", CHAT, bool, "The last message's text comes before the answer where it is the assistant's."),
    _rare("add_special_tokens", CHAT, bool, "True: the tokenizer adds its own to those that the template writes."),
    _rare("add_special_tokens", COMPLETIONS, bool, "False: a text prompt gets none."),
    _rare(
        "truncate_prompt_tokens",
        BOTH,
        int,
        "Of a longer prompt so many tokens are kept; -1: as many as leave room for max_tokens.",
    ),
    _rare("truncation_side", BOTH, str, "left (what is not said): the last tokens are kept; right: the first ones."),
    _refused("suffix", COMPLETIONS, "Text cannot be inserted; put what follows into the prompt.", ""),
    _refused("prompt_embeds", COMPLETIONS, "Send the prompt as text or token ids."),
    _refused("mm_processor_kwargs", CHAT, "Only text is understood.", {}),
    _refused("media_io_kwargs", CHAT, "Only text is understood.", {}),
    # Other ways of generating.
    _refused("best_of", BOTH, "Ask for n choices and choose among them.", 1),
    _refused("use_beam_search", BOTH, "There is no beam search; ask for n choices.", False),
    _refused("length_penalty", BOTH, "It has a meaning in beam search only, which there is not.", 1),
    _refused("early_stopping", BOTH, "It has a meaning in beam search only, which there is not.", False),
    _refused("logits_processors", BOTH, "Requests cannot bring code.", []),
    _refused("vllm_xargs", BOTH, "There are no extensions that take them.", {}),
    _refused("max_repetition_pattern_size", BOTH, "Repetition does not end an answer; use repetition_penalty.", 0),
    _refused("min_repetition_pattern_size", BOTH, "Repetition does not end an answer; use repetition_penalty.", 0),
    _refused("repetition_min_count", BOTH, "Repetition does not end an answer; use repetition_penalty.", 0),
    # Other forms of the answer.
    _rare("prompt_logprobs", BOTH, int, "0 to 20: of the prompt's tokens, with so many alternatives each."),
    _refused("detokenize", BOTH, "Answers always are text; return_token_ids tells the ids beside it.", True),
    _rare(
        "spaces_between_special_tokens",
        BOTH,
        bool,
        "As the model's tokenizer does it; false is refused where that one puts spaces.",
    ),
    _rare("return_token_ids", BOTH, bool, "prompt_token_ids and token_ids; not of reasoning that is left out."),
    _rare("return_tokens_as_token_ids", BOTH, bool, "Log-probabilities call their tokens token_id:N."),
    _refused("modalities", CHAT, "Only text is made.", ["text"]),
    _refused("audio", CHAT, "Only text is made."),
    _refused("verbosity", CHAT, "Models here have no such dial; say it in a message.", "medium"),
    _refused("web_search_options", CHAT, "The gateway searches nothing; give the model a tool."),
    _refused("store", CHAT, "Chat completions are not stored; leave it out.", False),
    # How the request is treated.
    _honoured("service_tier", BOTH, "Its priority: priority, default, auto, scale or flex, as far as the key allows."),
    _honoured("priority", BOTH, "A number; below 0 before others, above 0 after them, as far as the key allows."),
    _rare("cache_salt", BOTH, str, "Up to 1024 characters: a cache of its own within the tenant's."),
    _refused("kv_transfer_params", BOTH, "The platform itself decides where a prompt is computed."),
    _without_effect("prediction", CHAT, "It could only make the same answer come sooner."),
    _without_effect("user", BOTH, "Users are not told apart; API keys are."),
    _without_effect("safety_identifier", CHAT, "Users are not told apart; API keys are."),
    _without_effect("prompt_cache_key", BOTH, "The cache is found by the prompt itself."),
    _without_effect("prompt_cache_retention", BOTH, "What is used stays; there is no other retention."),
    _without_effect("metadata", CHAT, "It belongs to stored completions, and none is stored."),
    _without_effect("request_id", BOTH, "Send the header x-request-id, which is echoed."),
    # What others have added since.
    _refused("moderation", CHAT, "Nothing is moderated here; ask a service that does."),
    _refused("repetition_detection", BOTH, "Repetition does not end an answer; use repetition_penalty."),
    _refused("logprob_token_ids", BOTH, "Log-probabilities are told of the most likely tokens, not of chosen ones."),
    _refused("watermarking", BOTH, "Answers carry no watermark.", False),
    _refused("return_prompt_text", CHAT, "Answers do not repeat the prompt; see /tokenize.", False),
    _refused("return_weight_versions", BOTH, "Weights do not change under an answer; a revision is a model.", False),
    _refused("routed_experts_prompt_start", BOTH, "Which experts were chosen is not told.", 0),
    _refused("ec_transfer_params", BOTH, "The platform itself decides where a prompt is computed."),
    _without_effect("prompt_cache_options", CHAT, "The cache is found by the prompt itself; what is used stays."),
    _without_effect("session_id", BOTH, "A conversation is known by its prompt."),
    _without_effect("stream_interval", BOTH, "Chunks come as tokens do; how an answer is cut does not change it."),
    _without_effect("return_token_offsets", BOTH, "It is for vLLM's render endpoints; see /tokenize."),
    _without_effect("mm_payload", BOTH, "It is for vLLM's render endpoints."),
    _without_effect("return_mm_kwargs", BOTH, "It is for vLLM's render endpoints."),
)

_Body = TypeVar("_Body", bound=msgspec.Struct)


def rare(endpoint: Endpoint, fields: tuple[str, ...]) -> tuple[Parameter, ...]:
    """The endpoint's rows that are not among the `fields` of its plain body."""
    return tuple(row for row in PARAMETERS if endpoint in row.endpoints and row.name not in fields)


@functools.cache
def wide(kind: type[_Body]) -> type[_Body]:
    """The same record with the rare parameters of its `endpoint`, and with room for what is unknown."""
    endpoint: Endpoint | None = getattr(kind, "endpoint", None)
    extra: list[Any] = (
        []
        if endpoint is None
        else [
            (row.name, Any if row.form is None else row.form | None, None)
            for row in rare(endpoint, kind.__struct_fields__)
        ]
    )
    for name, options in getattr(kind, "nested", {}).items():
        extra.append((name, wide(options) | None, None))
    made = msgspec.defstruct(
        kind.__name__,
        extra,
        bases=(kind,),
        namespace={"wide": True, "__doc__": kind.__doc__},
        module=kind.__module__,
        kw_only=True,
        forbid_unknown_fields=False,
    )
    return cast(type[_Body], made)


def check_rare(body: msgspec.Struct, endpoint: Endpoint) -> None:
    """Refuse what a wide body asks for and cannot have. Raises ApiError (400)."""
    for row in _refusals(type(body), endpoint):
        value = getattr(body, row.name)
        if value is not None and not any(value == other and type(value) is type(other) for other in row.harmless):
            raise _refusal(row)


def unsupported(name: str, endpoint: Endpoint) -> ApiError:
    """The refusal of a parameter by its row of the table."""
    return _refusal(next(row for row in PARAMETERS if row.name == name and endpoint in row.endpoints))


def _refusal(row: Parameter) -> ApiError:
    return invalid(f"{row.name} is not supported. {row.sentence}", param=row.name, code="unsupported_parameter")


@functools.cache
def _refusals(kind: type[msgspec.Struct], endpoint: Endpoint) -> tuple[Parameter, ...]:
    """Of a wide kind, whose base is the plain one."""
    plain = cast(type[msgspec.Struct], kind.__mro__[1])
    return tuple(row for row in rare(endpoint, plain.__struct_fields__) if row.standing is Standing.REFUSED)


def unknown_fields(raw: bytes, kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Of a body that decodes as this wide kind: what it has beside. Names of options are `options.name`.

    Raises ApiError (400): a decoder that knows its fields does not look whether the other names are texts.
    """
    try:
        return _names_beside(raw.removeprefix(codecs.BOM_UTF8), kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not JSON in UTF-8: {error}", code="invalid_json") from error


def _names_beside(raw: bytes, kind: type[msgspec.Struct]) -> tuple[str, ...]:
    given = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    names = _beside(given, kind)
    for outer, options in getattr(kind, "nested", {}).items():
        inner = given.get(outer)
        if inner is not None and bytes(inner) != b"null":
            found = _beside(msgspec.json.decode(inner, type=dict[str, msgspec.Raw]), options)
            names += [f"{outer}.{name}" for name in found]
    return tuple(names)


def _beside(given: dict[str, msgspec.Raw], kind: type[msgspec.Struct]) -> list[str]:
    """Without nulls: a null is the same as an absent field."""
    known = kind.__struct_fields__
    return [name for name, value in given.items() if name not in known and bytes(value) != b"null"]


def ignored_header(names: tuple[str, ...]) -> Header:
    """The header that names them; `...` stands for those that do not fit or cannot stand in a header."""
    told: list[str] = []
    room = MAX_HEADER_BYTES - len(_MORE)
    for name in names[:MAX_NAMES]:
        if name.isascii() and name.isprintable() and name and not {" ", ","} & set(name) and len(name) + 2 <= room:
            told.append(name)
            room -= len(name) + 2
    if len(told) < len(names):
        told.append(_MORE)
    return b"x-antiphon-ignored", ", ".join(told).encode("ascii")
