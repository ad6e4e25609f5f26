"""An answer that has to call a tool: its grammar allows what the family's parser reads, and nothing else."""

from __future__ import annotations

import json

import pytest
from antiphon_gateway.tools import Dialect, ReasoningFamily, ToolFamily
from antiphon_gateway.tools.deepseek import MARKS as DEEPSEEK_MARKS
from antiphon_gateway.tools.forcing import forced_calls
from antiphon_gateway.tools.hermes import MARKS as HERMES_MARKS
from antiphon_gateway.tools.mistral import MARKS as MISTRAL_MARKS
from antiphon_proto.grammars import compile_grammar, load_tokenizer
from tokenizers import Tokenizer

from tests.support.fake_worker import byte_tokenizer
from tests.support.tool_outputs import DEEPSEEK, HERMES, LLAMA, MISTRAL, THINK, Output, Read, read_pieces

ADD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]
MARKS = {HERMES: HERMES_MARKS, MISTRAL: MISTRAL_MARKS, DEEPSEEK: DEEPSEEK_MARKS, LLAMA: ()}
FORMS = [(HERMES, False), (LLAMA, False), (MISTRAL, False), (MISTRAL, True), (DEEPSEEK, False), (DEEPSEEK, True)]


def tokenizer_with(marks: tuple[str, ...]) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(list(marks))
    return tokenizer


def generate(tokenizer: Tokenizer, grammar: str, wanted: str) -> str | None:
    """`wanted`, where the grammar allows it from beginning to end."""
    eos = tokenizer.token_to_id("<|im_end|>")
    loaded = load_tokenizer(tokenizer.to_str().encode(), tokenizer.get_vocab_size(), [eos])
    matcher = compile_grammar(loaded, "lark", grammar)
    ids = tokenizer.encode(wanted, add_special_tokens=False).ids
    if matcher.try_consume_tokens(ids) < len(ids) or not matcher.is_accepting():
        return None
    return tokenizer.decode(ids, skip_special_tokens=False)


def written(family: ToolFamily, names_first: bool, calls: list[tuple[str, str]]) -> str:
    """The calls as models of the family write them."""
    if family is HERMES:
        return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in calls)
    if family is LLAMA:
        return "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls)
    if family is MISTRAL and names_first:
        return "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls)
    if family is MISTRAL:
        return "[TOOL_CALLS][" + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in calls) + "]"
    begin, end, call, separator, call_end = (DEEPSEEK_MARKS[index] for index in (0, 1, 2, 4, 3))
    if names_first:
        return begin + "".join(f"{call}{n}{separator}{a}{call_end}" for n, a in calls) + end
    return begin + "\n".join(f"{call}function{separator}{n}\n```json\n{a}\n```{call_end}" for n, a in calls) + end


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize(("family", "names_first"), FORMS, ids=[f"{f.value}-{n}" for f, n in FORMS])
def test_the_grammar_allows_what_the_parser_reads_and_no_other_arguments(
    family: ToolFamily, names_first: bool, special: bool
) -> None:
    tokenizer = tokenizer_with(MARKS[family] if special else ())
    ids = {mark: tokenizer.token_to_id(mark) for mark in MARKS[family]} if special else {}
    dialect = Dialect(family, None, ids, names_first)
    grammar = forced_calls(dialect, TOOLS, several=True, begins_in_reasoning=False)
    calls = [("add", '{"a": 17}'), ("now", '{"x": ["\u00e9"]}')]
    text = generate(tokenizer, grammar, written(family, names_first, calls))
    assert text is not None
    assert read_pieces(Output("", "", Read(), family).parser(), list(text)) == Read(calls=tuple(calls))
    for name, arguments in (("add", '{"a": "17"}'), ("add", "{}"), ("now", "[]"), ("other", "{}")):
        assert generate(tokenizer, grammar, written(family, names_first, [(name, arguments)])) is None
    assert generate(tokenizer, grammar, "Hello") is None
    one = forced_calls(dialect, TOOLS, several=False, begins_in_reasoning=False)
    assert generate(tokenizer, one, written(family, names_first, calls[:1])) is not None
    assert generate(tokenizer, one, written(family, names_first, calls)) is None


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_reasoning_may_come_before_forced_calls(special: bool) -> None:
    marks = ("<think>", "</think>", *HERMES_MARKS)
    tokenizer = tokenizer_with(marks if special else ())
    ids = {mark: tokenizer.token_to_id(mark) for mark in marks} if special else {}
    dialect = Dialect(HERMES, ReasoningFamily.THINK, ids)
    call = written(HERMES, False, [("add", json.dumps({"a": 1}))])
    thought = "\nI must \u00e9 < add.\n</think>\n\n"
    free = forced_calls(dialect, TOOLS, several=True, begins_in_reasoning=False)
    inside = forced_calls(dialect, TOOLS, several=True, begins_in_reasoning=True)
    assert generate(tokenizer, free, call) is not None
    assert generate(tokenizer, free, f"<think>{thought}{call}") is not None
    assert generate(tokenizer, inside, f"{thought}{call}") is not None
    assert generate(tokenizer, inside, call) is None
    assert generate(tokenizer, free, f"<think>{thought}No.") is None
    text = f"{thought}{call}"
    output = Output("", "", Read(), HERMES, THINK, inside=True)
    assert read_pieces(output.parser(), list(text)) == Read("", "I must \u00e9 < add.", (("add", '{"a": 1}'),))
