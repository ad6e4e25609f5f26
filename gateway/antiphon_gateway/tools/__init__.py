"""Tool calls and reasoning, told apart from an answer's text.

`Dialects` knows how each model marks them, `parsing_for` what a request wants read, and a `Parsing`'s parser turns
pieces of text into events (`events`). Nothing here knows of HTTP, chunks or workers.
"""

from __future__ import annotations

from antiphon_gateway.tools.answer import AnswerParser
from antiphon_gateway.tools.choice import check_tool_choice, forced_grammar
from antiphon_gateway.tools.dialect import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Dialect,
    Dialects,
    ReasoningFamily,
    ToolFamily,
)
from antiphon_gateway.tools.events import CallArguments, CallBegun, CallEnded, Content, Event, Reasoning
from antiphon_gateway.tools.request import Parsing, check_tools, parsing_for

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "AnswerParser",
    "CallArguments",
    "CallBegun",
    "CallEnded",
    "Content",
    "Dialect",
    "Dialects",
    "Event",
    "Parsing",
    "Reasoning",
    "ReasoningFamily",
    "ToolFamily",
    "check_tool_choice",
    "check_tools",
    "forced_grammar",
    "parsing_for",
]
