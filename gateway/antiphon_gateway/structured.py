"""Structured output: what a request says that its answer has to keep to, as the protocol's `Grammar`.

OpenAI's `response_format`, and vLLM's names: `structured_outputs` and the older `guided_json`, `guided_regex`,
`guided_choice` and `guided_grammar`. One of them, or none. Whether it compiles is `grammar_checks`' to say; here are
form, size and what contradicts it. A schema is enforced whether it is `strict` or not: there is no half of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.errors import ApiError, invalid
from antiphon_gateway.models import Model
from antiphon_gateway.schema import ChatBody, CommonBody, StructuredOutputs
from antiphon_gateway.tools.request import Parsing

MAX_GRAMMAR_BYTES = 128 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_GRAMMAR_CHOICES = 4096
MAX_NUMBER_DIGITS = 15
"""Of more, llguidance may read the last one otherwise, and then no answer would validate."""
_NUMBERS = frozenset({"enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
MAX_GBNF_CHARACTERS = 8 * 1024
"""It is rewritten where the request is read, which holds up others: 10 ms for so many."""
_TAIL_IDS = 16
"""Of a prompt: where a template that turns reasoning off has written an empty one."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A grammar that a request asks for, and the parameter that asks."""

    grammar: pb.Grammar
    param: str


def wanted_by(body: CommonBody) -> Wanted | None:
    """None: any text will do. Raises ApiError (400)."""
    if (
        body.response_format is None
        and body.structured_outputs is None
        and body.guided_json is None
        and body.guided_regex is None
        and body.guided_choice is None
        and body.guided_grammar is None
    ):
        return None
    found = [wanted for wanted in _all_of(body) if wanted is not None]
    if not found:
        return None
    if len(found) > 1:
        raise invalid(
            f"{found[0].param} and {found[1].param} both say what the answer has to be; use one of them.",
            param=found[1].param,
        )
    _check_company(body, found[0].param)
    return found[0]


def after_reasoning(grammar: pb.Grammar, parsing: Parsing | None, model: Model, prompt_ids: list[int]) -> None:
    """Where the model reasons first, have the grammar begin behind it. Raises ApiError (400)."""
    marks = parsing.dialect.reasoning_marks if parsing is not None else None
    if parsing is None or marks is None:
        return
    opening, closing = (model.codec.encode(mark, add_special_tokens=False) for mark in marks)
    if parsing.begins_in_reasoning:
        if len(closing) != 1:
            raise invalid(
                f"Where this model's reasoning ends cannot be told ({marks[1]!r} is no token of its own), so an answer"
                " cannot be held to a grammar behind it; turn reasoning off (chat_template_kwargs).",
                param="response_format",
            )
        grammar.after_token_ids.extend(closing)
    elif len(opening) == len(closing) == 1 and closing[0] not in prompt_ids[-_TAIL_IDS:]:
        # The model decides: it may open its reasoning, or answer. (A prompt that closed it has decided.)
        grammar.after_token_ids.extend(closing)
        grammar.opening_token_id = opening[0]


def _all_of(body: CommonBody) -> list[Wanted | None]:
    return [
        _response_format(body.response_format),
        *(() if body.structured_outputs is None else _structured_outputs(body.structured_outputs)),
        *_fields("guided_", "json regex choice grammar", body),
    ]


def _check_company(body: CommonBody, param: str) -> None:
    """What else is in the body must not contradict it."""
    if body.ignore_eos:
        raise invalid(f"ignore_eos contradicts {param}, which says where the answer ends.", param="ignore_eos")
    if body.min_tokens:
        raise invalid(f"min_tokens contradicts {param}, which says where the answer ends.", param="min_tokens")
    if isinstance(body, ChatBody) and body.tools and body.tool_choice != "none":
        raise invalid(
            f"{param} holds for the whole answer, so no tool could be called; set tool_choice to 'none', or leave out"
            f" tools or {param}.",
            param=param,
        )


# ------------------------------------------------------------------ where it is said


def _response_format(given: dict[str, Any] | None) -> Wanted | None:
    param = "response_format"
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Wanted(pb.Grammar(kind=pb.GRAMMAR_JSON_OBJECT), param)
    if kind == "json_schema":
        named = given.get("json_schema")
        if not isinstance(named, dict):
            raise invalid("response_format.json_schema is missing: an object with name and schema.", param=param)
        schema = named.get("schema", named.get("json_schema"))
        if schema is None:
            raise invalid("response_format.json_schema.schema is missing: the JSON schema.", param=param)
        if not isinstance(named.get("strict"), bool | None):
            raise invalid("response_format.json_schema.strict must be true or false.", param=param)
        return _schema(schema, param)
    if kind == "structural_tag":
        raise invalid(
            "response_format 'structural_tag' is not supported; use 'json_schema', or structured_outputs.grammar.",
            param=param,
            code="unsupported_parameter",
        )
    raise invalid("response_format.type must be 'text', 'json_object' or 'json_schema'.", param=param)


def _structured_outputs(given: StructuredOutputs) -> list[Wanted | None]:
    for name in ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
        if getattr(given, name):
            raise invalid(
                f"structured_outputs.{name} is not supported.",
                param="structured_outputs",
                code="unsupported_parameter",
            )
    wanted = _fields("", "json regex choice grammar", given, param="structured_outputs")
    if given.json_object:
        wanted.append(Wanted(pb.Grammar(kind=pb.GRAMMAR_JSON_OBJECT), "structured_outputs"))
    if not any(wanted):
        raise invalid(
            "structured_outputs must have one of json, regex, choice, grammar and json_object.",
            param="structured_outputs",
        )
    return wanted


def _fields(prefix: str, names: str, holder: object, param: str = "") -> list[Wanted | None]:
    """`param`: what refusals name; empty: the field itself."""
    readers: dict[str, Callable[[Any, str], Wanted]] = {
        "json": _schema,
        "regex": _regex,
        "choice": _choice,
        "grammar": _grammar,
    }
    found: list[Wanted | None] = []
    for name in names.split():
        value = getattr(holder, prefix + name)
        found.append(None if value is None else readers[name](value, param or prefix + name))
    return found


# ------------------------------------------------------------------ what is said


def _schema(schema: Any, param: str) -> Wanted:
    if isinstance(schema, str):
        schema = _parsed(schema, param)
    if not isinstance(schema, dict | bool):
        raise invalid(f"{param}: a JSON schema is an object or a boolean.", param=param)
    _check_values(schema, param)
    return _wanted(pb.GRAMMAR_JSON_SCHEMA, msgspec.json.encode(schema).decode(), param)


def _parsed(text: str, param: str) -> Any:
    _check_size(text, param)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"{param} is not JSON: {error}", param=param) from error


def _check_values(schema: Any, param: str) -> None:
    """Its depth, and that its numbers are ones that llguidance reads to the last digit."""
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        for value in level:
            if isinstance(value, dict):
                _check_numbers(value, param)
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise invalid(f"{param}: the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels.", param=param)


def _check_numbers(schema: dict[str, Any], param: str) -> None:
    for name in _NUMBERS.intersection(schema):
        values = schema[name] if isinstance(schema[name], list) else [schema[name]]
        for value in values:
            if isinstance(value, float) and float(f"{value:.{MAX_NUMBER_DIGITS}g}") != value:
                raise invalid(
                    f"{param}: {name} has {value!r}; numbers may have {MAX_NUMBER_DIGITS} significant digits.",
                    param=param,
                )


def _children(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in values if isinstance(child, dict | list)]


def _regex(text: str, param: str) -> Wanted:
    return _wanted(pb.GRAMMAR_REGEX, text, param)


def _choice(choices: list[str], param: str) -> Wanted:
    if not choices or not all(choices):
        raise invalid(f"{param}: there must be a choice, and none may be empty.", param=param)
    if len(choices) > MAX_GRAMMAR_CHOICES:
        raise invalid(f"{param} may have {MAX_GRAMMAR_CHOICES} choices, not {len(choices)}.", param=param)
    # Each once: what is said twice would make no difference but work.
    return _wanted(pb.GRAMMAR_CHOICE, json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False), param)


def _grammar(text: str, param: str) -> Wanted:
    return _wanted(pb.GRAMMAR_LARK, text if "::=" not in text else _as_lark(text, param), param)


def _as_lark(text: str, param: str) -> str:
    """Of a grammar in GBNF, which is told by its `::=`."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    _check_size(text, param)
    if len(text) > MAX_GBNF_CHARACTERS:
        raise invalid(
            f"{param}: a GBNF grammar may have {MAX_GBNF_CHARACTERS} characters; write a longer one in Lark's syntax.",
            param=param,
        )
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises bare exceptions
        raise invalid(f"{param} cannot be read as a GBNF grammar: {str(error)[:300]}", param=param) from error


def _wanted(kind: pb.GrammarKind.ValueType, text: str, param: str) -> Wanted:
    _check_size(text, param)
    try:
        return Wanted(pb.Grammar(kind=kind, text=text), param)
    except (ValueError, UnicodeError) as error:
        raise _no_text(param) from error


def _check_size(text: str, param: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeError as error:
        raise _no_text(param) from error
    if size > MAX_GRAMMAR_BYTES:
        raise invalid(f"{param} may have {MAX_GRAMMAR_BYTES} bytes, not {size}.", param=param)


def _no_text(param: str) -> ApiError:
    return invalid(f"{param} has half a character (a lone surrogate).", param=param)
