"""How a model marks its reasoning and its calls: recognised in its chat template, or told by an option.

A template shows the marks because it has to write earlier turns with them. Where a template's calls have a form that
none of the families reads, nothing is recognised, and calls stay text.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from antiphon_gateway.models import Model
from antiphon_gateway.tools import deepseek, hermes, llama, mistral, qwen_xml
from antiphon_gateway.tools.events import Parser
from antiphon_gateway.tools.reasoning import ReasoningParser

AUTO = "auto"
NONE = "none"


class ToolFamily(StrEnum):
    HERMES = "hermes"
    LLAMA = "llama3_json"
    MISTRAL = "mistral"
    DEEPSEEK = "deepseek"
    QWEN_XML = "qwen3_coder"


class ReasoningFamily(StrEnum):
    THINK = "think"
    MISTRAL = "mistral"


TOOL_PARSERS = (AUTO, NONE, *(family.value for family in ToolFamily))
REASONING_PARSERS = (AUTO, NONE, *(family.value for family in ReasoningFamily))

_MARKS = {
    ToolFamily.HERMES: hermes.MARKS,
    ToolFamily.LLAMA: llama.MARKS,
    ToolFamily.MISTRAL: mistral.MARKS,
    ToolFamily.DEEPSEEK: deepseek.MARKS,
    ToolFamily.QWEN_XML: hermes.MARKS,
}
_REASONING_MARKS = {
    ReasoningFamily.THINK: ("<think>", "</think>"),
    ReasoningFamily.MISTRAL: ("[THINK]", "[/THINK]"),
}
_GLM = "<arg_key>"
"""Within `<tool_call>`: a form that nothing here reads."""
_TAIL_IDS = 16
"""Of a prompt: more than an opening mark and the line ends behind it."""
_MISTRAL_ID_CHARACTERS = 9
"""Mistral's templates refuse ids of another length when the call comes back."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One model's. `special_ids`: of those of its marks that are special tokens."""

    tools: ToolFamily | None
    reasoning: ReasoningFamily | None
    special_ids: Mapping[str, int] = field(default_factory=dict)
    names_first: bool = False
    """Of the two forms that Mistral and DeepSeek have: the newer one, without an object around each call."""

    @property
    def tool_special_ids(self) -> tuple[int, ...]:
        return () if self.tools is None else self._ids(_MARKS[self.tools])

    @property
    def reasoning_special_ids(self) -> tuple[int, ...]:
        return () if self.reasoning_marks is None else self._ids(self.reasoning_marks)

    @property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """The one that opens and the one that closes."""
        return None if self.reasoning is None else _REASONING_MARKS[self.reasoning]

    def call_parser(self, tools: Mapping[str, Mapping[str, Any]]) -> Parser | None:
        """For answers to a request that offers these tools, by name; of each, the schemas of its parameters."""
        match self.tools:
            case ToolFamily.HERMES:
                return hermes.HermesParser()
            case ToolFamily.LLAMA:
                return llama.LlamaParser(tools)
            case ToolFamily.MISTRAL:
                return mistral.MistralParser()
            case ToolFamily.DEEPSEEK:
                return deepseek.DeepSeekParser()
            case ToolFamily.QWEN_XML:
                return qwen_xml.QwenXmlParser(tools)
        return None

    def reasoning_parser(self, *, inside: bool) -> ReasoningParser | None:
        """`inside`: the prompt has opened the reasoning (`opened_by`)."""
        if self.reasoning_marks is None:
            return None
        opening, closing = self.reasoning_marks
        return ReasoningParser(opening, closing, inside=inside)

    def opened_by(self, model: Model, prompt_ids: list[int]) -> bool:
        """Whether the prompt ends with the mark that opens reasoning."""
        if self.reasoning_marks is None:
            return False
        return model.codec.decode(prompt_ids[-_TAIL_IDS:]).rstrip().endswith(self.reasoning_marks[0])

    def call_id(self) -> str:
        """A new one."""
        if self.tools is ToolFamily.MISTRAL:
            letters = string.ascii_letters + string.digits
            return "".join(secrets.choice(letters) for _ in range(_MISTRAL_ID_CHARACTERS))
        return f"call_{secrets.token_hex(12)}"

    def _ids(self, marks: Iterable[str]) -> tuple[int, ...]:
        return tuple(self.special_ids[mark] for mark in marks if mark in self.special_ids)


class Dialects:
    """What is known of models so far. Owned by the gateway."""

    def __init__(self, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        """Of `TOOL_PARSERS` and `REASONING_PARSERS`."""
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self._known: dict[str, Dialect] = {}

    def of(self, model: Model) -> Dialect:
        known = self._known.get(model.digest)
        if known is None:
            known = self._known[model.digest] = self._make(model)
        return known

    def _make(self, model: Model) -> Dialect:
        source = model.template.source if model.template is not None else ""
        tools = recognise_tools(source) if self._tool_parser == AUTO else None
        if self._tool_parser not in (AUTO, NONE):
            tools = ToolFamily(self._tool_parser)
        reasoning = recognise_reasoning(source) if self._reasoning_parser == AUTO else None
        if self._reasoning_parser not in (AUTO, NONE):
            reasoning = ReasoningFamily(self._reasoning_parser)
        special = model.codec.special_tokens()
        marks = (*(_MARKS[tools] if tools else ()), *(_REASONING_MARKS[reasoning] if reasoning else ()))
        return Dialect(
            tools,
            reasoning,
            {mark: special[mark] for mark in marks if mark in special},
            names_first=mistral.ARGS in source if tools is ToolFamily.MISTRAL else deepseek.FENCE not in source,
        )


def recognise_tools(template: str) -> ToolFamily | None:
    """By the marks that the template writes."""
    if deepseek.CALL_BEGIN in template:
        return ToolFamily.DEEPSEEK
    if mistral.CALLS in template:
        return ToolFamily.MISTRAL
    if hermes.OPEN in template:
        if qwen_xml.FUNCTION in template:
            return ToolFamily.QWEN_XML
        return None if _GLM in template else ToolFamily.HERMES
    if llama.TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return ToolFamily.LLAMA
    return None


def recognise_reasoning(template: str) -> ReasoningFamily | None:
    for family, marks in _REASONING_MARKS.items():
        if any(mark in template for mark in marks):
            return family
    return None
