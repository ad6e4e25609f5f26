"""What a chat request asks of the reading of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from antiphon_gateway.errors import invalid
from antiphon_gateway.models import Model, Prompt
from antiphon_gateway.schema import ChatBody
from antiphon_gateway.tools.answer import AnswerParser
from antiphon_gateway.tools.dialect import Dialect, Dialects
from antiphon_gateway.tools.reasoning_tokens import count_reasoning
from antiphon_gateway.tools.steps import is_name


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the answers to one request are read. Each choice has a parser of its own."""

    dialect: Dialect
    tools: Mapping[str, Mapping[str, Any]]
    """By name, the schemas of their parameters. Empty: no calls are looked for."""
    begins_in_reasoning: bool
    one_call: bool
    with_reasoning: bool
    named: bool = False
    """`tool_choice` names the tool that is called."""

    def parser(self) -> AnswerParser:
        return AnswerParser(
            self.dialect.reasoning_parser(inside=self.begins_in_reasoning),
            self.dialect.call_parser(self.tools) if self.tools else None,
            one_call=self.one_call,
            with_reasoning=self.with_reasoning,
        )

    def enough(self) -> Callable[[int, str], bool] | None:
        """Given choices' texts piece by piece, says of each when it has the one call that is wanted. None: all of an
        answer is wanted."""
        if not self.one_call or not self.tools:
            return None
        parsers: dict[int, AnswerParser] = {}

        def has_its_call(choice: int, text: str) -> bool:
            parser = parsers.get(choice)
            if parser is None:
                parser = parsers[choice] = self.parser()
            parser.push(text)
            return parser.over

        return has_its_call

    def reasoning_tokens(self, model: Model, outputs: Iterable[Sequence[int]]) -> int | None:
        """How many tokens of these choices were reasoning; None: the model is not known to reason."""
        marks = self.dialect.reasoning_marks
        if marks is None:
            return None
        return sum(count_reasoning(model, ids, marks, inside=self.begins_in_reasoning) for ids in outputs)

    @property
    def leaves_nothing_out(self) -> bool:
        """All that the model says is told."""
        return self.with_reasoning or self.dialect.reasoning is None

    @property
    def kept_special_ids(self) -> tuple[int, ...]:
        """Special tokens that have to come as text."""
        calls = self.dialect.tool_special_ids if self.tools else ()
        return (*self.dialect.reasoning_special_ids, *calls)


def parsing_for(body: ChatBody, model: Model, prompt: Prompt, dialects: Dialects) -> Parsing | None:
    """None: answers are text and nothing else."""
    dialect = dialects.of(model)
    offered = dialect.tools is not None and body.tools and body.tool_choice != "none"
    if not offered and dialect.reasoning is None:
        return None
    return Parsing(
        dialect,
        _schemas_of(body.tools or ()) if offered else {},
        begins_in_reasoning=_begins_in_reasoning(body, dialect, model, prompt),
        one_call=body.parallel_tool_calls is False,
        with_reasoning=body.include_reasoning is not False,
        named=isinstance(body.tool_choice, dict),
    )


def _begins_in_reasoning(body: ChatBody, dialect: Dialect, model: Model, prompt: Prompt) -> bool:
    if dialect.reasoning_marks is None or not body.continue_final_message:
        return dialect.opened_by(model, prompt.token_ids)
    # The answer goes on where the last message stops.
    opening, closing = dialect.reasoning_marks
    content = body.messages[-1].get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    text = "".join(str(part.get("text") or "") for part in parts)
    return text.rfind(opening) > text.rfind(closing)


def _schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Of checked tools."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        properties = (tool["function"].get("parameters") or {}).get("properties")
        schemas[tool["function"]["name"]] = properties if isinstance(properties, dict) else {}
    return schemas


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises ApiError (400) naming the tool that is at fault."""
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") != "function":
            raise invalid(f"{where}.type must be 'function'; there are no others here.", param=f"{where}.type")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise invalid(f"{where}.function is missing.", param=f"{where}.function")
        name = function.get("name")
        if not isinstance(name, str) or not name or not is_name(name, name):
            raise invalid(
                f"{where}.function.name must be a text of letters, digits and any of _ - . : /.",
                param=f"{where}.function.name",
            )
        if not isinstance(function.get("parameters") or {}, dict):
            raise invalid(f"{where}.function.parameters must be a JSON schema.", param=f"{where}.function.parameters")
