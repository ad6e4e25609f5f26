"""The model's chat template: messages in, prompt text out.

Templates come with models and are Jinja as Hugging Face's `transformers` renders it (trimmed blocks, `tojson` without
escapes, `raise_exception`, `strftime_now`, loop controls, `generation` blocks), in a sandbox with limits
(`template_sandbox`), and with one on what it may produce. Messages are brought to the form that templates know: text
parts are joined, a null content is the empty text, or null with calls where the template asks for that, arguments of
tool calls are objects, and a developer message is a system message where the template has no word for developer.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec

from antiphon_gateway import template_allowance
from antiphon_gateway.errors import invalid
from antiphon_gateway.template_sandbox import TemplateSandbox

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""What an answer's reasoning is called, by clients that send it back and by templates that want it."""
_ASKS_FOR_NULL = re.compile(r"""content(['"]\])?\s+is\s+none""")
_TOOLS = re.compile(r"\btools\b")
_DOCUMENTS = re.compile(r"\bdocuments\b")
MAX_OTHER_CHARACTERS = 64 * 1024
"""Of a template that a request brings; the longest that come with models have a third of it."""
_OTHERS_KEPT = 16
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})


_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)
"""What a template's own operations raise; all else is a fault of this gateway."""


class TemplateInvalid(ValueError):
    """The model's chat template is not one; the message says where."""


class _GenerationExtension(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. Safe to use from many threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        template_allowance.begin()
        environment = TemplateSandbox([jinja2.ext.loopcontrols, _GenerationExtension])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateInvalid(f"line {error.lineno} of the chat template: {error.message}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.takes_tools = _TOOLS.search(source) is not None
        self.takes_documents = _DOCUMENTS.search(source) is not None
        self._knows_developer = "developer" in source
        self._asks_for_null = _ASKS_FOR_NULL.search(source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
        limit_characters: int,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt. Raises ApiError (400) where messages or `extra` do not suit the template."""
        reserved = sorted(_RESERVED.intersection(extra))
        if reserved:
            raise invalid(f"chat_template_kwargs may not set {reserved[0]}.", param="chat_template_kwargs")
        variables: dict[str, Any] = {
            **self._special_tokens,
            **extra,
            "messages": [self._message(message, index) for index, message in enumerate(messages)],
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        parts: list[str] = []
        size = 0
        template_allowance.begin(limit_characters)
        try:
            for part in self._template.generate(variables):
                size += len(part)
                if size > limit_characters:
                    raise invalid("The chat template makes a prompt without end of these messages.", param="messages")
                parts.append(part)
        except jinja2.TemplateError as error:
            raise invalid(f"The model's chat template refuses these messages: {error}", param="messages") from error
        except _FAULTS as error:
            raise invalid(
                f"The model's chat template fails on these messages ({type(error).__name__}: {error}).",
                param="messages",
            ) from error
        return "".join(parts)

    def _message(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        where = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise invalid(f"{where}.role must be one of {', '.join(sorted(_ROLES))}.", param=f"{where}.role")
        if role == "developer" and not self._knows_developer:
            role = "system"
        result = {key: value for key, value in message.items() if value is not None}
        result["role"] = role
        reasoning = next((message[name] for name in _REASONING if isinstance(message.get(name), str)), None)
        if reasoning is not None:
            for name in _REASONING:
                result.setdefault(name, reasoning)
        calls = message.get("tool_calls")
        if calls is not None:
            result["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
        if message.get("content") is None and not calls and role != "assistant":
            raise invalid(f"{where}.content is missing.", param=f"{where}.content")
        result["content"] = _text(message.get("content"), f"{where}.content")
        if calls and not result["content"] and self._asks_for_null:
            result["content"] = None
        return result


@functools.lru_cache(_OTHERS_KEPT)
def compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """A template that a client wrote, kept for its next request. Raises TemplateInvalid."""
    if len(source) > MAX_OTHER_CHARACTERS:
        raise TemplateInvalid(f"a chat template may have {MAX_OTHER_CHARACTERS} characters, not {len(source)}")
    try:
        return ChatTemplate(source, dict(special_tokens))
    except TemplateInvalid:
        raise
    except Exception as error:  # what Jinja and the compiler behind it raise of nonsense has no common base
        raise TemplateInvalid(f"the chat template cannot be compiled ({type(error).__name__}: {error})") from error


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where} must be a text or a list of parts.", param=where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            what = repr(kind)[:50] if isinstance(kind, str) else "without a type"
            raise invalid(
                f"{where}[{index}]: only text parts are supported, not a part {what}.",
                param=f"{where}[{index}]",
                code="unsupported_content",
            )
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise invalid(f"{where} must be a list.", param=where)
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where} needs function.name.", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _arguments(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(text: str) -> Any:
    """What is not JSON goes through as the text that it is."""
    try:
        value = msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return text
    return _Arguments(value, text or "{}") if isinstance(value, dict) else value


class _Arguments(dict[str, Any]):
    """Arguments of a call, for both kinds of templates: an object to those that write it with `tojson` or go through
    its items, and the client's own text to those that join it to other text (DeepSeek's)."""

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    width = len(indent) if isinstance(indent, str) else indent or 0
    template_allowance.pay(template_allowance.weight(value) * (1 + max(0, width) + sum(map(len, separators or ()))))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().replace(tzinfo=None).strftime(form)


def special_tokens(tokenizer_config_json: str, *, bos_token: str, eos_token: str) -> dict[str, str]:
    """Names and texts of special tokens, as templates may use them, from tokenizer_config.json."""
    tokens: dict[str, str] = {}
    try:
        config = msgspec.json.decode(tokenizer_config_json) if tokenizer_config_json else {}
    except msgspec.DecodeError:
        config = {}
    for key, value in config.items() if isinstance(config, dict) else ():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[key] = text
    return {**tokens, "bos_token": bos_token, "eos_token": eos_token}
