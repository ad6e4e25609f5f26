"""`tool_choice`: whether the answer may call tools, and which one it has to call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.errors import invalid
from antiphon_gateway.schema import ChatBody
from antiphon_gateway.tools.dialect import ToolFamily
from antiphon_gateway.tools.forcing import forced_calls
from antiphon_gateway.tools.request import Parsing

MAX_GRAMMAR_BYTES = 256 * 1024
"""Of all the tools' schemas together, where a call is forced."""


def named_tool(body: ChatBody) -> str | None:
    """The one tool that has to be called; None: `tool_choice` names none."""
    choice = body.tool_choice
    return choice["function"]["name"] if isinstance(choice, dict) else None


def check_tool_choice(body: ChatBody) -> None:
    """With checked tools. Raises ApiError (400)."""
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise invalid(
                "tool_choice must be 'none', 'auto', 'required', or {'type': 'function', 'function': {'name': NAME}}.",
                param="tool_choice",
            )
        if name not in [tool["function"]["name"] for tool in body.tools or ()]:
            raise invalid(f"tool_choice: there is no tool {name[:100]!r} among tools.", param="tool_choice")
    elif choice != "required":
        raise invalid(f"tool_choice must be 'none', 'auto' or 'required', not {choice[:50]!r}.", param="tool_choice")
    elif not body.tools:
        raise invalid("tool_choice 'required' needs tools.", param="tool_choice")
    for param in ("ignore_eos", "min_tokens"):
        if getattr(body, param):
            raise invalid(f"{param} contradicts tool_choice, which says what the answer is.", param=param)


def forced_grammar(body: ChatBody, parsing: Parsing | None) -> pb.Grammar | None:
    """What the answer has to keep to; None: calls are the model's own decision. With a checked choice.

    Raises ApiError (400) where this model's calls cannot be forced.
    """
    name = named_tool(body)
    if name is None and body.tool_choice != "required":
        return None
    if parsing is None or parsing.dialect.tools is None:
        raise invalid(
            "tool_choice: it is not known how this model writes calls of tools, so none can be forced"
            " (see --tool-parser).",
            param="tool_choice",
            code="unsupported_parameter",
        )
    if parsing.dialect.tools is ToolFamily.QWEN_XML:
        raise invalid(
            "tool_choice: this model writes arguments as tags, and calls in that form cannot be forced; use 'auto'.",
            param="tool_choice",
            code="unsupported_parameter",
        )
    tools: Sequence[Mapping[str, Any]] = [
        tool for tool in body.tools or () if name is None or tool["function"]["name"] == name
    ]
    text = forced_calls(
        parsing.dialect,
        tools,
        several=name is None and body.parallel_tool_calls is not False,
        begins_in_reasoning=parsing.begins_in_reasoning,
    )
    if len(text) > MAX_GRAMMAR_BYTES:
        raise invalid(f"tools: their schemas may have {MAX_GRAMMAR_BYTES} bytes together.", param="tools")
    try:
        return pb.Grammar(kind=pb.GRAMMAR_LARK, text=text)
    except ValueError as error:
        raise invalid("tools: a text has half a character (a lone surrogate).", param="tools") from error
