"""Chat templates: what they see, and what they may not do."""

from __future__ import annotations

from typing import Any

import pytest
from antiphon_gateway import template_allowance
from antiphon_gateway.errors import ApiError
from antiphon_gateway.templating import ChatTemplate, TemplateInvalid, special_tokens


def render(source: str, messages: list[dict[str, Any]] | None = None, **arguments: Any) -> str:
    arguments = {"tools": None, "add_generation_prompt": True, "extra": {}, "limit_characters": 10_000, **arguments}
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render([{"role": "user", "content": "hi"}] if messages is None else messages, **arguments)


def test_templates_see_what_transformers_shows_them() -> None:
    source = """
    {%- for message in messages %}
        {%- if loop.index0 > 5 %}{% break %}{% endif %}
        {{- bos_token + message.role + ':' + message['content'] + eos_token }}
    {%- endfor %}
    {%- if add_generation_prompt %}!{% endif %}
    """
    assert render(source).strip() == "<s>user:hi</s>!"
    assert render("{% if tools is none %}none{% endif %}{{ documents }}") == "noneNone"
    assert render("{{ tools | tojson }}", tools=[{"name": "\u00e9<"}]) == '[{"name": "\u00e9<"}]'
    assert render("{{ tools | tojson(indent=1) }}", tools=[1]) == "[\n 1\n]"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"
    assert render("{{ enable_thinking }}", extra={"enable_thinking": False}) == "False"


def test_messages_have_the_form_that_templates_know() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": []},
    ]
    source = (
        "{% for m in messages %}{{ m.role }}={{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }};{% endfor %}"
    )
    expected = '[{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]'
    assert render(source, messages) == f"system=be brief;assistant={expected};tool=ab;assistant=;"
    assert render("{# developer #}" + source, messages).startswith("developer=")
    assert render("{{ 'refusal' in messages[1] }}", messages) == "False"


def test_arguments_that_are_not_json_stay_text() -> None:
    call = {"function": {"name": "f", "arguments": "not json"}}
    assert render(
        "{{ messages[0].tool_calls[0].function.arguments }}", [{"role": "assistant", "tool_calls": [call]}]
    ) == ("not json")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ a | tojson }}", '{"x": "\u00e9", "n": 1}'),
        ("{{ a | items | list }}", "[('x', '\u00e9'), ('n', 1)]"),
        ("{{ a.x }}{{ a['n'] }}{{ a is mapping }}{{ a is string }}", "\u00e91TrueFalse"),
        ("{{ '<' + a + '>' }}", '<{"x":"\u00e9","n":1}>'),
        ("{{ a + '>' }}{{ '<' ~ a }}", '{"x":"\u00e9","n":1}><{"x":"\u00e9","n":1}'),
        ("{{ a }}", '{"x":"\u00e9","n":1}'),
    ],
)
def test_arguments_suit_templates_that_want_objects_and_those_that_want_text(source: str, expected: str) -> None:
    call = {"function": {"name": "f", "arguments": '{"x":"\u00e9","n":1}'}}
    before = "{% set a = messages[0].tool_calls[0].function.arguments %}"
    assert render(before + source, [{"role": "assistant", "tool_calls": [call]}]) == expected


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_that_is_sent_back_has_the_name_that_the_template_knows(name: str) -> None:
    message = {"role": "assistant", "content": "b", name: "a"}
    assert render("{{ messages[0].reasoning_content }}{{ messages[0].reasoning }}", [message]) == "aa"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ messages[0].content + 5 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{% for i in range(50000) %}{{ 'x' * 100 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ [1] * 10 ** 12 }}",
        "{{ (10 ** (10 ** 10)) | string | length }}",
        "{{ 'x' | center(10 ** 12) }}",
        "{{ 'x'.rjust(10 ** 12) }}",
        "{{ 'x'['ljust'](10 ** 12) }}",
        "{{ 'x' | attr('zfill') }}{{ ('x' | attr('zfill'))(10 ** 12) }}",
        "{{ '\t'.expandtabs(10 ** 12) }}",
        "{{ '%1000000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '{:>{}}'.format('x', 10 ** 9) }}",
        "{{ '{:>999999999}'.format_map({}) }}",
        "{{ '%999999999s' | format('x') }}",
        "{{ [1] | batch(10 ** 10, 'x') | list }}",
        "{{ [1] | tojson(indent=10 ** 12) }}",
        "{{ 'x' | indent(10 ** 12, true) }}",
        "{% set y = 'x' * 10 ** 6 %}{{ y | replace('x', y) | length }}",
        "{% set y = 'x' * 10 ** 6 %}{{ y.replace('x', y) | length }}",
        "{% set y = 'x' * 10 ** 6 %}{{ y.join(range(100000) | list) | length }}",
        "{% set y = 'x' * 10 ** 6 %}{{ range(100000) | join(y) | length }}",
        "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(99) %}"
        "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x | tojson }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x | upper }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = ns.x + ['x' * 10 ** 6] %}{% endfor %}",
        "{{ lipsum(10 ** 9) }}",
        "{{ 'x'.encode().center(10 ** 12) }}",
        "{{ (1).to_bytes(10 ** 12, 'big') }}",
        "{{ ('x' | safe).center(10 ** 12) }}",
        "{{ range(99999) | map('center', 10 ** 6) | list | length }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (messages | attr('__class__')).__mro__ }}",
    ],
)
def test_a_template_that_fails_or_runs_wild_is_a_400(source: str) -> None:
    with pytest.raises(ApiError) as refused:
        render(source)
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% if j %}{% continue %}{% endif %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{% set a = f(n - 1) ~ f(n - 1) %}{% endif %}{% endmacro %}{{ f(90) }}",
    ],
)
def test_a_template_that_does_not_end_and_says_nothing_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_allowance, "LIMIT_CPU_S", 0.02)
    with pytest.raises(ApiError, match="takes too long"):
        render(source)


def test_one_rendering_that_ran_wild_takes_nothing_from_the_next() -> None:
    template = ChatTemplate("{{ 'x' * (10 ** 12 if messages[0].content == 'wild' else 3) }}", {})
    arguments: dict[str, Any] = {"tools": None, "add_generation_prompt": True, "extra": {}, "limit_characters": 10_000}
    with pytest.raises(ApiError):
        template.render([{"role": "user", "content": "wild"}], **arguments)
    assert template.render([{"role": "user", "content": "tame"}], **arguments) == "xxx"


def test_the_templates_own_words_reach_the_client() -> None:
    with pytest.raises(ApiError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_that_is_none_is_said() -> None:
    with pytest.raises(TemplateInvalid, match="line 2"):
        ChatTemplate("a\n{% if %}", {})


def test_special_tokens_come_from_the_tokenizers_configuration() -> None:
    config = '{"pad_token": {"content": "<pad>"}, "unk_token": "<unk>", "mask_token": null, "other": "x"}'
    assert special_tokens(config, bos_token="<s>", eos_token="</s>") == {
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    assert special_tokens("", bos_token="", eos_token="") == {"bos_token": "", "eos_token": ""}
