"""Outputs of every family, whole and cut anywhere: what is read of them is the same."""

from __future__ import annotations

import itertools

import pytest
from antiphon_gateway.tools import CallArguments, CallBegun, Content, Reasoning
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tool_outputs import (
    DEEPSEEK,
    HERMES,
    LLAMA,
    MISTRAL,
    OUTPUTS,
    QWEN_XML,
    THINK,
    Output,
    Read,
    read_pieces,
)

NAMES = [output.name for output in OUTPUTS]


@pytest.mark.parametrize("output", OUTPUTS, ids=NAMES)
def test_an_output_means_what_it_says(output: Output) -> None:
    assert read_pieces(output.parser(), [output.text]) == output.read


@pytest.mark.parametrize("output", OUTPUTS, ids=NAMES)
def test_no_cut_changes_what_is_read(output: Output) -> None:
    """At every border once, at every two borders a few characters apart, and at all of them."""
    text = output.text
    for place in range(len(text) + 1):
        assert read_pieces(output.parser(), [text[:place], text[place:]]) == output.read, place
        end = place + 3
        assert read_pieces(output.parser(), [text[:place], text[place:end], text[end:]]) == output.read, place
    assert read_pieces(output.parser(), list(text)) == output.read


_PIECES = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<think>",
            "</think>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<|python_tag|>",
        ),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "function",
            "```json",
        ),
        *('{"name": "add", "arguments": ', '{"name": "now"}', '{"a": "}\\""}', '"name"', '"arguments"', "null", "add"),
        *(
            "{",
            "}",
            "[",
            "]",
            '"',
            ":",
            ",",
            "\\",
            " ",
            "\n",
            "\r",
            "x",
            "<",
            "<function=add>",
            "<parameter=a>",
            "\n</parameter>",
            "</function>",
            "😀",
            "```",
            ";",
            "\x01",
            "17",
        ),
    ]
)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(_PIECES, max_size=14),
    st.lists(st.integers(0, 200), max_size=6),
    st.sampled_from([HERMES, LLAMA, MISTRAL, DEEPSEEK, QWEN_XML]),
    st.sampled_from([None, THINK]),
    st.booleans(),
)
def test_no_cut_changes_what_is_read_of_any_text(pieces, cuts, family, reasoning, inside) -> None:
    text = "".join(pieces)
    output = Output("any", text, Read(), family, reasoning, inside)
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    cut = [text[begin:end] for begin, end in itertools.pairwise(borders)]
    whole = read_pieces(output.parser(), [text])
    assert read_pieces(output.parser(), cut) == whole
    assert read_pieces(output.parser(), list(text)) == whole


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='ab <[{\n"é', max_size=60), st.sampled_from([HERMES, LLAMA, MISTRAL, DEEPSEEK, QWEN_XML]))
def test_text_without_marks_is_prose_to_the_letter(text, family) -> None:
    assert read_pieces(Output("any", text, Read(), family).parser(), list(text)) == Read(text)


def test_arguments_come_as_they_are_written() -> None:
    parser = Output("any", "", Read(), HERMES).parser()
    assert parser.push('Hi <tool_call>{"name": "add"') == [Content("Hi")]
    assert parser.push(', "arguments": {"a": ') == [CallBegun(0, "add"), CallArguments(0, '{"a": ')]
    assert parser.push("1, ") == [CallArguments(0, "1, ")]


def test_prose_waits_only_for_what_may_be_a_mark_or_the_space_before_one() -> None:
    parser = Output("any", "", Read(), HERMES).parser()
    assert parser.push("a<") == [Content("a")]
    assert parser.push("b ") == [Content("<b")]
    assert parser.push("<tool_cal") == []
    assert parser.push("m") == [Content(" <tool_calm")]


def test_reasoning_comes_as_it_is_thought_and_can_be_left_out() -> None:
    output = Output("any", "<think>\nSo.\n</think>\n\nYes", Read(), None, THINK)
    parser = output.parser()
    assert parser.push("<think>\nSo") == [Reasoning("So")]
    assert parser.push(".\n</thin") == [Reasoning(".")]
    assert parser.push("k>\nYes") == [Content("Yes")]
    assert read_pieces(output.parser(with_reasoning=False), list(output.text)) == Read("Yes")


def test_with_one_call_wanted_the_answer_ends_behind_it() -> None:
    for output in OUTPUTS:
        first = read_pieces(output.parser(one_call=True), list(output.text))
        assert first.calls == output.read.calls[:1]
        assert output.read.content.startswith(first.content)
        if not output.read.calls:
            assert first == output.read
