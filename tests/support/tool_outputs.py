"""Outputs of models as they come from each family, and what is to be read in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from antiphon_gateway.tools import (
    AnswerParser,
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
    ReasoningFamily,
    ToolFamily,
)
from antiphon_gateway.tools.dialect import Dialect

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {},
    "add": {"a": {"type": "integer"}, "b": {"type": "number"}, "c": {"anyOf": [{"type": "string"}, {"type": "array"}]}},
    "search": {"q": {"type": "string"}},
    "now": {},
}
"""Tools by name, and the schemas of their parameters."""


@dataclasses.dataclass(frozen=True)
class Read:
    """All that an answer says."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments."""


@dataclasses.dataclass(frozen=True)
class Output:
    name: str
    text: str
    read: Read
    tools: ToolFamily | None = None
    reasoning: ReasoningFamily | None = None
    inside: bool = False

    def parser(self, *, one_call: bool = False, with_reasoning: bool = True) -> AnswerParser:
        dialect = Dialect(self.tools, self.reasoning)
        return AnswerParser(
            dialect.reasoning_parser(inside=self.inside),
            dialect.call_parser(TOOLS),
            one_call=one_call,
            with_reasoning=with_reasoning,
        )


def read_pieces(parser: AnswerParser, pieces: Sequence[str]) -> Read:
    """What the pieces say, read one after the other. Fails where no client could follow the events."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return told([*events, *parser.end()])


def told(events: Sequence[Event]) -> Read:
    content, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    open_call: int | None = None
    for event in events:
        match event:
            case Content(text):
                assert text
                content += text
            case Reasoning(text):
                assert text
                assert not content
                reasoning += text
            case CallBegun(index, name):
                assert open_call is None
                assert index == len(calls)
                open_call = index
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == open_call
                assert text
                calls[index] = (calls[index][0], calls[index][1] + text)
            case CallEnded(index):
                assert index == open_call
                open_call = None
    assert open_call is None
    return Read(content, reasoning, tuple(calls))


HERMES, LLAMA, MISTRAL, DEEPSEEK = ToolFamily.HERMES, ToolFamily.LLAMA, ToolFamily.MISTRAL, ToolFamily.DEEPSEEK
QWEN_XML = ToolFamily.QWEN_XML
THINK = ReasoningFamily.THINK

OSLO = '{"city": "Oslo", "unit": "C"}'
ODD = '{"city": "Troms\\u00f8 \\"north\\" {<tool_call>} \\\\", "list": [1, [2, {}]], "æ": "😀\\n"}'

_HERMES = [
    (
        "one call",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>',
        Read(calls=(("get_weather", OSLO),)),
    ),
    (
        "prose and two calls",
        f'I look it up.\n<tool_call>\n{{"name": "get_weather", "arguments": {ODD}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": -2.5e3}}\n</tool_call>\n',
        Read("I look it up.", calls=(("get_weather", ODD), ("add", '{"a": 1, "b": -2.5e3}'))),
    ),
    (
        "arguments first, keys between, a string of JSON, none, null",
        '<tool_call>{"arguments": {"a": [1]}, "id": "x", "n": 1.5, "l": [{}], "name": "add"}</tool_call>'
        '<tool_call>{"type": "function", "name": "search", "arguments": "{\\"q\\": \\"a\\\\nb\\"}"}</tool_call>'
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": null}</tool_call>',
        Read(calls=(("add", '{"a": [1]}'), ("search", '{"q": "a\\nb"}'), ("now", "{}"), ("now", "{}"))),
    ),
    (
        "end marks forgotten",
        '<tool_call>\n{"name": "now", "arguments": {}}\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}',
        Read(calls=(("now", "{}"), ("add", '{"a": 1}'))),
    ),
    (
        "a brace too few and a brace too many",
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>'
        '<tool_call>{"name": "now", "arguments": {}}}</tool_call>',
        Read("}", calls=(("add", '{"a": 1}'), ("now", "{}"))),
    ),
    (
        "arguments that stop at the mark",
        '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call> done',
        Read("done", calls=(("add", '{"a": 1'),)),
    ),
    (
        "cut in the arguments",
        '<tool_call>{"name": "add", "arguments": {"a": "1 <tool',
        Read(calls=(("add", '{"a": "1 <tool'),)),
    ),
    ("cut before the name", 'So: <tool_call>\n{"na', Read('So: <tool_call>\n{"na')),
    ("cut in the mark", "So: <tool_ca", Read("So: <tool_ca")),
    ("not JSON", "a <tool_call> b </tool_call> c", Read("a <tool_call> b </tool_call> c")),
    ("no name", '<tool_call>{"arguments": {}}</tool_call>', Read('<tool_call>{"arguments": {}}</tool_call>')),
    ("an empty object", "<tool_call>{}</tool_call>", Read("<tool_call>{}</tool_call>")),
    (
        "arguments that are none",
        '<tool_call>{"name": "add", "arguments": 5}</tool_call>',
        Read('<tool_call>{"name": "add", "arguments": 5}</tool_call>'),
    ),
    (
        "a mark that leads to nothing, then a call",
        '<tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>',
        Read("<tool_call>", calls=(("now", "{}"),)),
    ),
    ("nothing of the kind", "if a < b: x = '<tool' + \"\\n\"\n\n  ", Read("if a < b: x = '<tool' + \"\\n\"\n\n  ")),
    ("nothing", "", Read()),
]

_LLAMA = [
    (
        "one call",
        '{"name": "get_weather", "parameters": {"city": "Oslo", "unit": "C"}}',
        Read(calls=(("get_weather", OSLO),)),
    ),
    (
        "behind the tag",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {ODD}}}\n',
        Read(calls=(("get_weather", ODD),)),
    ),
    (
        "two calls",
        '{"type": "function", "name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
        Read(calls=(("add", '{"a": 1}'), ("now", "{}"))),
    ),
    (
        "JSON that is no call",
        '{"name": "Bob", "parameters": {"age": 5}}',
        Read('{"name": "Bob", "parameters": {"age": 5}}'),
    ),
    ("JSON of another form", '\n{"people": [{"name": "add"}]}', Read('\n{"people": [{"name": "add"}]}')),
    ("prose first", 'Use {"name": "add", "parameters": {}}', Read('Use {"name": "add", "parameters": {}}')),
    ("prose after", '{"name": "now", "parameters": {}} It is late.', Read("It is late.", calls=(("now", "{}"),))),
    ("code behind the tag", "<|python_tag|>print(1)", Read("<|python_tag|>print(1)")),
    ("only the tag", "<|python_tag|>", Read("<|python_tag|>")),
    ("less than the tag", " <|pyth", Read(" <|pyth")),
    ("cut", '{"name": "add", "parameters": {"a"', Read(calls=(("add", '{"a"'),))),
    ("cut early", '{"name": "ad', Read('{"name": "ad')),
    ("nothing but prose", "Hello <b>", Read("Hello <b>")),
]

_MISTRAL = [
    (
        "a list",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ODD}, "id": "abcdefghi"}}, '
        '{"name": "now", "arguments": {}}]',
        Read(calls=(("get_weather", ODD), ("now", "{}"))),
    ),
    (
        "names first",
        f'Let me see.[TOOL_CALLS]get_weather[ARGS]{OSLO}[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{{"a": 1}}',
        Read("Let me see.", calls=(("get_weather", OSLO), ("add", '{"a": 1}'))),
    ),
    ("without the middle mark", '[TOOL_CALLS]add {"a": "}"}', Read(calls=(("add", '{"a": "}"}'),))),
    ("a list without its end", '[TOOL_CALLS][{"name": "now", "arguments": {}}', Read(calls=(("now", "{}"),))),
    (
        "a list that goes wrong",
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"x": 1}]',
        Read(', {"x": 1}]', calls=(("now", "{}"),)),
    ),
    (
        "a list that goes on wrongly",
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, 5]',
        Read(", 5]", calls=(("now", "{}"),)),
    ),
    ("cut in a list", '[TOOL_CALLS][{"name": "now", "arguments": {}}, ', Read(", ", calls=(("now", "{}"),))),
    ("a list of nothing", "x [TOOL_CALLS][]", Read("x [TOOL_CALLS][]")),
    ("no name", "[TOOL_CALLS]{}", Read("[TOOL_CALLS]{}")),
    ("no arguments", "[TOOL_CALLS]now[ARGS]now", Read("[TOOL_CALLS]now[ARGS]now")),
    ("no call", "[TOOL_CALLS] is the mark.", Read("[TOOL_CALLS] is the mark.")),
    ("cut at the name", " [TOOL_CALLS]get_wea", Read(" [TOOL_CALLS]get_wea")),
    ("cut in the id", "[TOOL_CALLS]now[CALL_ID]abc", Read("[TOOL_CALLS]now[CALL_ID]abc")),
    ("cut in the arguments", '[TOOL_CALLS]add[ARGS]{"a": [', Read(calls=(("add", '{"a": ['),))),
    ("an endless name", "[TOOL_CALLS]" + 300 * "a" + '{"a": 1}', Read("[TOOL_CALLS]" + 300 * "a" + '{"a": 1}')),
    ("only prose", "a [1] and [TOOL", Read("a [1] and [TOOL")),
]

_BEGIN, _CALL, _SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_CALL_END, _END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"

_DEEPSEEK = [
    (
        "V3",
        f"Let me look.\n\n{_BEGIN}{_CALL}function{_SEP}get_weather\n```json\n{ODD}\n```{_CALL_END}\n"
        f'{_CALL}function{_SEP}add\n```json\n{{"a": 1}}\n```{_CALL_END}{_END}',
        Read("Let me look.", calls=(("get_weather", ODD), ("add", '{"a": 1}'))),
    ),
    (
        "V3.1",
        f'{_BEGIN}{_CALL}get_weather{_SEP}{OSLO}{_CALL_END}{_CALL}add{_SEP}{{"a": 1}}{_CALL_END}{_END}',
        Read(calls=(("get_weather", OSLO), ("add", '{"a": 1}'))),
    ),
    ("without a fence", f"{_CALL}function{_SEP}now\n{{}}{_CALL_END}", Read(calls=(("now", "{}"),))),
    (
        "a plain fence, prose after",
        f"{_CALL}function{_SEP}now\n```\n{{}}\n```\n{_CALL_END}{_END}So.",
        Read("So.", calls=(("now", "{}"),)),
    ),
    ("cut in the arguments", f'{_BEGIN}{_CALL}add{_SEP}{{"a": 1', Read(calls=(("add", '{"a": 1'),))),
    ("cut at the name", f"{_BEGIN}{_CALL}function{_SEP}get_w", Read(f"{_CALL}function{_SEP}get_w")),
    ("cut at the fence", f"{_CALL}function{_SEP}now\n``", Read(f"{_CALL}function{_SEP}now\n``")),
    (
        "arguments that are none",
        f"{_CALL}function{_SEP}now\n```json\n5\n```",
        Read(f"{_CALL}function{_SEP}now\n```json\n5\n```"),
    ),
    ("no name", f"{_CALL}{_SEP}{{}}", Read(f"{_CALL}{_SEP}{{}}")),
    ("no call", f"{_CALL} is the mark, {_SEP} another", Read(f"{_CALL} is the mark, {_SEP} another")),
    ("only prose", "a <｜b｜> <｜tool▁", Read("a <｜b｜> <｜tool▁")),
]

_QWEN_XML = [
    (
        "two calls",
        'Let me see.\n\n<tool_call>\n<function=search>\n<parameter=q>\na "b"\n\n<c> </d>\n\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>\n17\n</parameter>\n<parameter=b>\n-1.5\n</parameter>\n"
        '<parameter=c>\n[1, "x"]\n</parameter>\n</function>\n</tool_call>',
        Read(
            "Let me see.",
            calls=(("search", '{"q": "a \\"b\\"\\n\\n<c> </d>\\n"}'), ("add", '{"a": 17, "b": -1.5, "c": [1, "x"]}')),
        ),
    ),
    ("no parameters", "<tool_call><function=now></function></tool_call>", Read(calls=(("now", "{}"),))),
    (
        "a text for a number, an unknown parameter, nothing",
        "<tool_call>\n<function=add>\n<parameter=a>many</parameter><parameter=x>5</parameter>"
        "<parameter=b>\n</parameter></function></tool_call> Done.",
        Read("Done.", calls=(("add", '{"a": "many", "x": "5", "b": ""}'),)),
    ),
    ("the inner end forgotten", "<tool_call><function=now></tool_call>So", Read("So", calls=(("now", "{}"),))),
    ("prose in a call", "<tool_call><function=now>why</tool_call>", Read("why", calls=(("now", "{}"),))),
    (
        "cut in a text",
        "<tool_call><function=search><parameter=q>\nab</par",
        Read(calls=(("search", '{"q": "ab</par'),)),
    ),
    ("cut in a number", "<tool_call><function=add><parameter=a>\n12", Read(calls=(("add", '{"a": 12'),))),
    ("cut at a key", "<tool_call><function=add><parameter=a", Read("<parameter=a", calls=(("add", "{"),))),
    ("cut at the name", "<tool_call>\n<function=ad", Read("<tool_call>\n<function=ad")),
    ("no function", "<tool_call> {} </tool_call>", Read("<tool_call> {} </tool_call>")),
    ("no name", "<tool_call><function=></function>", Read("<tool_call><function=></function>")),
]

_CALL_AFTER = f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>'

_REASONING = [
    Output(
        "reasoned",
        "<think>\nFirst æ,\n\nthen b.\n</think>\n\nThe answer.\n",
        Read("The answer.\n", "First æ,\n\nthen b."),
        None,
        THINK,
    ),
    Output("opened by the prompt", "\nSo.\n\n</think>\n\nYes", Read("Yes", "So."), None, THINK, inside=True),
    Output("opened twice", "<think>\nSo.</think>Yes", Read("Yes", "So."), None, THINK, inside=True),
    Output("not reasoned", "  The <think> mark and </think>.", Read("  The <think> mark and </think>."), None, THINK),
    Output("nothing reasoned", "<think>\n\n</think>\n\nYes", Read("Yes"), None, THINK),
    Output("cut in reasoning", "<think>\nSo </thi", Read(reasoning="So </thi"), None, THINK),
    Output("cut in the first mark", " <thin", Read(" <thin"), None, THINK),
    Output("cut behind the mark", "<think>So.</think>\n\n", Read(reasoning="So."), None, THINK),
    Output(
        "marks in reasoning",
        "<think>a<think>b <tool_call>{} x</think>c</think>",
        Read("c</think>", "a<think>b <tool_call>{} x"),
        HERMES,
        THINK,
    ),
    Output(
        "then a call",
        f"<think>\nI call.\n</think>\n\n{_CALL_AFTER}",
        Read("", "I call.", (("get_weather", OSLO),)),
        HERMES,
        THINK,
    ),
    Output(
        "then prose and a call",
        f"I call.\n</think>\n\nNow:\n{_CALL_AFTER}",
        Read("Now:", "I call.", (("get_weather", OSLO),)),
        HERMES,
        THINK,
        True,
    ),
    Output(
        "of Mistral",
        f"[THINK]So.[/THINK]Yes[TOOL_CALLS]add[ARGS]{OSLO}",
        Read("Yes", "So.", (("add", OSLO),)),
        MISTRAL,
        ReasoningFamily.MISTRAL,
    ),
    Output("nothing at all", "", Read(), HERMES, THINK, True),
]

OUTPUTS = [
    *(
        Output(f"{family.value}: {name}", text, read, family)
        for family, outputs in (
            (HERMES, _HERMES),
            (LLAMA, _LLAMA),
            (MISTRAL, _MISTRAL),
            (DEEPSEEK, _DEEPSEEK),
            (QWEN_XML, _QWEN_XML),
        )
        for name, text, read in outputs
    ),
    *_REASONING,
]
