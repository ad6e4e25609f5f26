"""The grammar of an answer that has to call tools: the family's mark-up around the tools' own schemas, in Lark.

The calls begin at once, or after reasoning, which is free. Marks that are special tokens stand by their ids, as the
same letters in ordinary tokens are something else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from antiphon_gateway.tools import deepseek, hermes, mistral
from antiphon_gateway.tools.dialect import Dialect, ToolFamily

_ANY_OBJECT = {"type": "object"}
_LINE_ENDS = r"/\n{0,2}/"


@dataclass(frozen=True, slots=True)
class _Form:
    """How a family writes calls: `first`, then each call between its marks, with `between` them, then `last`."""

    first: str
    before_name: str
    before_arguments: str
    after_arguments: str
    between: str
    last: str


def forced_calls(
    dialect: Dialect,
    tools: Sequence[Mapping[str, Any]],
    *,
    several: bool,
    begins_in_reasoning: bool,
) -> str:
    """For checked tools, of which one is to be called, or several where that is allowed. The dialect has tools."""
    assert dialect.tools is not None
    form = _form(dialect.tools, names_first=dialect.names_first)
    marks = dialect.special_ids

    def text(literal: str) -> str:
        return _literal(literal, marks)

    more = f" ({text(form.between)} call)*" if several else ""
    lines = [f"calls: {text(form.first)} call{more} {text(form.last)}"]
    names = [f"call_{index}" for index in range(len(tools))]
    lines.append(f"call: {' | '.join(names)}")
    for index, tool in enumerate(tools):
        function = tool["function"]
        head = form.before_name + function["name"] + form.before_arguments
        lines.append(f"call_{index}: {text(head)} arguments_{index} {text(form.after_arguments)}")
        lines.append(f"arguments_{index}: %json {_schema(function.get('parameters') or _ANY_OBJECT)}")
    return "\n".join([*_start(dialect, begins_in_reasoning=begins_in_reasoning), *lines])


def _schema(parameters: Mapping[str, Any]) -> str:
    """In one line, its texts as everywhere else where output has to keep to a schema."""
    from antiphon_proto.grammars import JSON_OPTIONS

    return msgspec.json.encode({**parameters, "x-guidance": JSON_OPTIONS}).decode()


def _start(dialect: Dialect, *, begins_in_reasoning: bool) -> list[str]:
    """Reasoning, where the model may reason, and the calls."""
    if dialect.reasoning_marks is None:
        return ["start: calls"]
    opening, closing = dialect.reasoning_marks
    marks = dialect.special_ids
    if closing in marks:
        thought = [f"thought: TEXT {_literal(closing, marks)}", "TEXT: /(?s:.*)/"]
    else:
        thought = [f"thought[suffix={json.dumps(closing)}]: /(?s:.*)/"]
    if begins_in_reasoning:
        return [f"start: thought {_LINE_ENDS} calls", *thought]
    return [f"start: ({_literal(opening, marks)} thought {_LINE_ENDS})? calls", *thought]


def _literal(text: str, marks: Mapping[str, int]) -> str:
    """As Lark's strings, and ids where special tokens stand."""
    place, mark = min(((text.find(mark), mark) for mark in marks if mark in text), default=(-1, ""))
    if place < 0:
        return json.dumps(text, ensure_ascii=False)
    before, after = text[:place], text[place + len(mark) :]
    parts = [json.dumps(before, ensure_ascii=False)] if before else []
    parts.append(f"<[{marks[mark]}]>")
    if after:
        parts.append(_literal(after, marks))
    return " ".join(parts)


def _form(family: ToolFamily, *, names_first: bool) -> _Form:
    match family:
        case ToolFamily.HERMES:
            end = "}\n" + hermes.CLOSE
            return _Form("", hermes.OPEN + '\n{"name": "', '", "arguments": ', end, "\n", "")
        case ToolFamily.LLAMA:
            return _Form("", '{"name": "', '", "parameters": ', "}", "; ", "")
        case ToolFamily.MISTRAL if names_first:
            return _Form("", mistral.CALLS, mistral.ARGS, "", "", "")
        case ToolFamily.MISTRAL:
            return _Form(mistral.CALLS + "[", '{"name": "', '", "arguments": ', "}", ", ", "]")
        case ToolFamily.DEEPSEEK if names_first:
            before = deepseek.CALL_BEGIN
            return _Form(deepseek.CALLS_BEGIN, before, deepseek.SEPARATOR, deepseek.CALL_END, "", deepseek.CALLS_END)
        case ToolFamily.DEEPSEEK:
            before = deepseek.CALL_BEGIN + "function" + deepseek.SEPARATOR
            end = "\n```" + deepseek.CALL_END
            return _Form(deepseek.CALLS_BEGIN, before, "\n```json\n", end, "\n", deepseek.CALLS_END)
        case ToolFamily.QWEN_XML:
            raise ValueError("arguments that are no JSON have no schema to keep to")
