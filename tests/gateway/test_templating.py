"""Chat templates: what they see, and what they may not do."""

from __future__ import annotations

from typing import Any

import pytest
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
    ],
)
def test_a_template_that_fails_or_runs_wild_is_a_400(source: str) -> None:
    with pytest.raises(ApiError) as refused:
        render(source)
    assert (refused.value.status, refused.value.param) == (400, "messages")


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
