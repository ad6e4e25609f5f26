"""Which marks a model uses, told from its chat template; and how a replayed call looks in such templates."""

from __future__ import annotations

from typing import Any

import pytest
from antiphon_gateway.models import Model
from antiphon_gateway.templating import ChatTemplate
from antiphon_gateway.tools import Dialects, ReasoningFamily, ToolFamily

from tests.support.fake_worker import byte_card

QWEN = """
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n<tools>' }}{% for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nCall by <tool_call>\\n{"name": <name>, "arguments": <args>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
"""
LLAMA = """
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
{%- else %}{{- message.content }}{% endif %}{{- '<|eot_id|>' }}
{%- endfor %}{# tools #}
"""
MISTRAL = """
{%- for message in messages %}
{%- if message.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- ', "id": "' + call.id + '"}' }}{% endfor %}{{- ']' }}
{%- else %}{{- message.content }}{% endif %}
{%- endfor %}
"""
MISTRAL_11 = """
{%- for message in messages %}
{%- for call in message.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}{{- message.content }}
{%- endfor %}{# [THINK] #}
"""
DEEPSEEK = """
{%- for message in messages %}
{%- if message.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}{% for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
{{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}{{- '<｜tool▁calls▁end｜>' }}
{%- else %}{{- message.content.split('</think>') | last }}{% endif %}
{%- endfor %}
"""
DEEPSEEK_31 = (
    DEEPSEEK.replace("call.type + '<｜tool▁sep｜>' + call.function.name", "call.function.name + '<｜tool▁sep｜>'")
    .replace("'\\n```json\\n' + ", "")
    .replace("\\n```<", "<")
)

ARGUMENTS = '{"city":"Troms\u00f8"}'
SPACED = '{"city": "Troms\u00f8"}'
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}},
        ],
    },
]


@pytest.mark.parametrize(
    ("template", "tools", "names_first", "reasoning"),
    [
        (QWEN, ToolFamily.HERMES, None, None),
        (QWEN + "{# <think> #}", ToolFamily.HERMES, None, ReasoningFamily.THINK),
        (QWEN + "{# <function= #}", ToolFamily.QWEN_XML, None, None),
        (QWEN + "{# <arg_key> #}", None, None, None),
        (LLAMA, ToolFamily.LLAMA, None, None),
        ("{# <|python_tag|> #}", ToolFamily.LLAMA, None, None),
        (MISTRAL, ToolFamily.MISTRAL, False, None),
        (MISTRAL_11, ToolFamily.MISTRAL, True, ReasoningFamily.MISTRAL),
        (DEEPSEEK, ToolFamily.DEEPSEEK, False, ReasoningFamily.THINK),
        (DEEPSEEK_31, ToolFamily.DEEPSEEK, True, ReasoningFamily.THINK),
        ("{# a plain one #}", None, None, None),
        ("", None, None, None),
    ],
)
def test_a_template_shows_its_marks(
    template: str, tools: ToolFamily | None, names_first: bool | None, reasoning: ReasoningFamily | None
) -> None:
    dialect = Dialects().of(Model(byte_card(template=template)))
    assert (dialect.tools, dialect.reasoning) == (tools, reasoning)
    if names_first is not None:
        assert dialect.names_first == names_first


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, f'<tool_call>\n{{"name": "weather", "arguments": {SPACED}}}\n</tool_call>'),
        (LLAMA, f'{{"name": "weather", "parameters": {SPACED}}}'),
        (MISTRAL, f'[TOOL_CALLS][{{"name": "weather", "arguments": {SPACED}, "id": "abcdefghi"}}]'),
        (MISTRAL_11, f"[TOOL_CALLS]weather[ARGS]{SPACED}"),
        (DEEPSEEK, f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"),
        (DEEPSEEK_31, f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"),
    ],
)
def test_a_replayed_call_is_written_and_read_in_the_same_way(template: str, expected: str) -> None:
    text = ChatTemplate(template, {}).render(
        MESSAGES, tools=None, add_generation_prompt=False, extra={}, limit_characters=10_000
    )
    assert expected in text
    parser = Dialects().of(Model(byte_card(template=template))).call_parser({"weather": {}})
    assert parser is not None
    begun, arguments, *_ = [*parser.push(expected), *parser.end()]
    assert (begun.name, arguments.text) in (("weather", ARGUMENTS), ("weather", SPACED))  # type: ignore[union-attr]
