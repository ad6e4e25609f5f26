"""A rendered chat has the ids that `transformers` gives it, with the constructs of each public model family."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jinja2
import pytest
from antiphon_gateway.continuing import cut_behind
from antiphon_gateway.errors import ApiError
from antiphon_gateway.templating import ChatTemplate
from antiphon_gateway.tokenization import TokenCodec
from antiphon_gateway.tokenization_cache import EncodingCache
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.support.chat_templates import Family
from tests.support.fake_worker import byte_tokenizer
from tests.support.more_chat_templates import FAMILIES

USER = {"role": "user", "content": "Hi there"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [
        {
            "role": "user",
            "content": "  \u00c5 \u4f60\u597d \U0001f469\u200d\U0001f680 \u0645\u0631\u062d\u0628\u0627\n",
        },
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n{{ 'not a template' }} <b>&amp;\"</b> "},
        {"role": "user", "content": "a\r\n\n\tb  <|im_end|></s>[INST]"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "last"},
    ],
    "answered": [{"role": "system", "content": "\u00e9"}, USER, {"role": "assistant", "content": " Well, \n I"}],
    "reasoned": [USER, {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}],
    "systems only": [{"role": "system", "content": "x"}],
    "out of turn": [USER, USER],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": 'Tells the <weather> & "more" \u00e9',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": ' "Town" '},
                    "days": {"type": ["integer", "null"]},
                    "more": {"type": "array", "items": {"type": "number"}},
                },
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "forecast")
]


def _call(name: str, arguments: str, number: int = 1) -> dict[str, Any]:
    return {"id": f"abcdefgh{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(content: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"abcdefgh{number}", "content": content}


_FIRST = _call("weather", '{"city": "Troms\u00f8", "days": 2, "more": [1.5, null, true]}')
CALLED: dict[str, list[dict[str, Any]]] = {
    "called": [USER, {"role": "assistant", "content": "", "tool_calls": [_FIRST]}],
    "told": [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [_FIRST]},
        _result('{"rain": "\u00e9"}'),
    ],
    "two": [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [_FIRST, _call("forecast", "{}", 2)]},
        _result("wet"),
        _result("<dry>", 2),
        {"role": "assistant", "content": "Wet."},
        USER,
    ],
}


class Both:
    """One template as the gateway and as `transformers` render it, over one tokenizer."""

    def __init__(self, family: Family) -> None:
        self.family = family
        tokenizer = byte_tokenizer()
        specials = {family.bos_token, family.eos_token, *family.marks}
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in sorted(specials)])
        tokens = {"bos_token": family.bos_token, "eos_token": family.eos_token}
        self._theirs = PreTrainedTokenizerFast(
            tokenizer_object=copy.deepcopy(tokenizer), chat_template=family.source, **tokens
        )
        self._ours = ChatTemplate(family.source, tokens)
        self._codec = TokenCodec(tokenizer.to_str().encode(), EncodingCache(1 << 20))

    def theirs(self, messages: list[dict[str, Any]], **arguments: Any) -> list[int] | None:
        """None: the template refuses these messages."""
        messages = copy.deepcopy(messages)
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            if not self.family.text_arguments:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        try:
            ids: list[int] = self._theirs.apply_chat_template(messages, return_dict=False, **arguments)
        except (jinja2.TemplateError, TypeError):
            return None
        return ids

    def ours(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> list[int] | None:
        try:
            text = self._ours.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                extra=extra,
                limit_characters=100_000,
            )
        except ApiError:
            return None
        if continue_final_message:
            text = cut_behind(text, messages)
        return self._codec.begin_chat(text, b"").finish().tolist()


def _variations(family: Family) -> Iterator[tuple[str, dict[str, Any], Mapping[str, Any]]]:
    chats = {**CHATS, **(CALLED if family.tools and not family.null_content else {})}
    for name in chats:
        for prompted in (True, False):
            yield name, {"add_generation_prompt": prompted}, {}
        if family.tools:
            yield name, {"tools": TOOLS, "add_generation_prompt": True}, {}
        for variables in family.variables:
            yield name, {"add_generation_prompt": True, **({"tools": TOOLS} if family.tools else {})}, variables


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_transformers(name: str) -> None:
    family = FAMILIES[name]
    both = Both(family)
    rendered = 0
    for chat, arguments, variables in _variations(family):
        messages = {**CHATS, **CALLED}[chat]
        expected = both.theirs(messages, **arguments, **variables)
        assert both.ours(messages, **arguments, **variables) == expected, (chat, arguments, variables)
        rendered += expected is not None
    assert rendered >= 6, "the comparison is of prompts, not of refusals"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_message_goes_on_as_with_transformers(name: str) -> None:
    both = Both(FAMILIES[name])
    arguments = {"add_generation_prompt": False, "continue_final_message": True}
    systemless = CHATS["answered"][1:]
    expected = both.theirs(systemless, **arguments)
    assert expected is not None
    assert both.ours(systemless, **arguments) == expected


def test_a_call_without_content_is_told_by_templates_that_ask_for_null() -> None:
    """They would say an empty text instead of the call."""
    both = Both(FAMILIES["deepseek-v3"])
    with_null = copy.deepcopy(CALLED["told"])
    with_null[2]["content"] = None
    prompts = [both.ours(messages, TOOLS) for messages in (with_null, CALLED["told"])]
    assert prompts[0] == prompts[1] == Both(FAMILIES["deepseek-r1"]).ours(with_null, TOOLS, add_generation_prompt=False)


@pytest.mark.parametrize("name", ["%d %b %Y", "%Y-%m-%d %Z|%z|", "%A, %B"])
def test_the_date_is_told_as_transformers_tells_it(name: str) -> None:
    both = Both(Family("{{ strftime_now('" + name + "') }}"))
    assert both.ours([USER]) == both.theirs([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ namespace(self=1).self }}{{ dict(a=1) }}{{ dict.fromkeys(['a'], 1) }}",
        "{{ dict.__class__ }}",
        "{{ [1, 2] | tojson(separators=(',', ':')) }}{{ {'b': 1, 'a': [2]} | tojson(indent=2, sort_keys=true) }}",
        "{{ ['a', none, 1.5, true] | join(', ') }}{{ messages | map(attribute='role') | join('-') }}",
        "{{ 'a-b' | replace('-', 1) }}{{ 'x' | center(5) }}|{{ 'a\nb' | indent(3, true) }}{{ '%s=%5.1f' % ('a', 2) }}",
        "{{ '{} {:>3}'.format('a', 1) }}{{ 'a,b'.split(',') }}{{ 'ab'.replace('a', 'cc', 1) }}{{ '7'.zfill(3) }}",
        "{{ 'a' ~ 1 ~ none ~ [2] ~ undefined_name }}{{ [1] + [2] }}{{ 'ab' * 2 }}{{ 2 ** 10 }}{{ 7 % 3 }}{{ 1 + 1.5 }}",
        "{{ range(7) | batch(3, 'x') | list }}{{ range(5) | slice(2) | map('list') | list }}"
        "{{ 'a b c' | wordwrap(2) }}",
        "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{{ loop.depth }}{% endfor %}",
        "{% for x in range(9) if x is odd %}{{ loop.index ~ '/' ~ loop.length }}{% else %}none{% endfor %}",
        "{% set x %} a {{ messages[0].content }}{% endset %}{{ x | length }}{{ x is string }}{{ x.strip() + '!' }}",
        "{% filter upper %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfilter %}"
        "{% with a = 1 %}{{ a }}{% endwith %}",
    ],
)
def test_constructs_mean_what_they_mean_with_transformers(source: str) -> None:
    both = Both(Family("|" + source))
    assert both.ours([USER]) == both.theirs([USER])
