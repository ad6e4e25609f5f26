"""Qwen3-Coder, and Qwen since 3.5: calls whose arguments are tags of their own, amid prose.

    <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n...</function>\\n</tool_call>

The client gets JSON. What kind a value has is in the tool's own schema only: a text goes on as it comes, anything else
once it is complete, as the JSON that it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from antiphon_gateway.tools.call_object import MAX_NAME_CHARACTERS
from antiphon_gateway.tools.events import CallArguments, CallBegun, CallEnded, Event
from antiphon_gateway.tools.hermes import CLOSE, MARKS, OPEN
from antiphon_gateway.tools.marks import SPACE, may_become, split
from antiphon_gateway.tools.steps import StepParser, is_name

FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"

_OPEN_SCHEMAS = ("anyOf", "oneOf", "allOf", "$ref")
_FOLLOWING = (PARAMETER, FUNCTION_END, CLOSE)
"""What may stand between parameters."""


class QwenXmlParser(StepParser):
    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """`tools`: of each tool that the request offers, the schemas of its parameters."""
        super().__init__()
        self._tools = tools
        self._schemas: Mapping[str, Any] = {}
        self._in_call = False
        self._keys = 0
        self._held = ""
        """Of a value that is told whole: what is there."""
        self._is_text = False

    def _outside(self, events: list[Event]) -> bool:
        found = split(self._text, (OPEN,))
        self._prose.text(found.before, events)
        self._text = found.rest
        if found.mark:
            self._step = self._function
        return bool(found.mark)

    def _function(self, events: list[Event]) -> bool:
        inner = self._text.lstrip(SPACE)
        if may_become(inner, FUNCTION):
            return False
        name, end, rest = inner.removeprefix(FUNCTION).partition(">")
        if not inner.startswith(FUNCTION) or not is_name(name, name) or (end and not name):
            self._prose.text(OPEN, events)
            self._step = self._outside
            return True
        if not end:
            return False
        self._text, self._in_call, self._keys = rest, True, 0
        self._schemas = self._tools.get(name, {})
        self._prose.call()
        events += (CallBegun(self._calls, name), CallArguments(self._calls, "{"))
        self._step = self._between
        return True

    def _between(self, events: list[Event]) -> bool:
        """Before a parameter, or the call's end."""
        inner = self._text.lstrip(SPACE)
        if any(may_become(inner, mark) for mark in _FOLLOWING):
            return False
        if not inner.startswith(PARAMETER):
            self._text = inner.removeprefix(FUNCTION_END)
            self._close(events)
            return True
        key, end, rest = inner.removeprefix(PARAMETER).partition(">")
        if len(key) > MAX_NAME_CHARACTERS:
            self._close(events)
            return True
        if not end:
            return False
        self._text, self._held, self._is_text = rest, "", _is_text(self._schemas.get(key))
        comma = ", " if self._keys else ""
        self._keys += 1
        self._tell(comma + _quoted(key) + (': "' if self._is_text else ": "), events)
        self._step = self._value_begins
        return True

    def _value_begins(self, events: list[Event]) -> bool:
        """One line's end in front of the value belongs to the mark-up, and one behind it."""
        if not self._text:
            return False
        self._text = self._text.removeprefix("\n")
        self._step = self._take_value
        return True

    def _take_value(self, events: list[Event]) -> bool:
        found = split(self._text, (PARAMETER_END, "\n" + PARAMETER_END))
        if self._is_text:
            self._tell(_quoted(found.before)[1:-1], events)
        else:
            self._held += found.before
        self._text = found.rest
        if not found.mark:
            return False
        self._tell('"' if self._is_text else _json(self._held), events)
        self._step = self._between
        return True

    def _after(self, events: list[Event]) -> bool:
        """Behind a call: its end's mark is awaited."""
        found = split(self._text, MARKS)
        self._prose.text(found.before, events)
        self._text = found.rest
        if found.mark:
            self._step = self._function if found.mark == OPEN else self._outside
        return bool(found.mark)

    def _close(self, events: list[Event]) -> None:
        self._tell("}", events)
        events.append(CallEnded(self._calls))
        self._calls += 1
        self._in_call, self._step = False, self._after

    def _tell(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(CallArguments(self._calls, text))

    def _at_end(self, events: list[Event]) -> None:
        if self._step == self._function:
            self._prose.text(OPEN, events)
        if not self._in_call:
            return
        if self._step == self._take_value:
            rest = self._held + self._text
            self._tell(_quoted(rest)[1:-1] if self._is_text else rest, events)
            self._text = ""
        events.append(CallEnded(self._calls))


def _is_text(schema: Any) -> bool:
    """Whether a value of this schema is a text, whatever it looks like."""
    if not isinstance(schema, dict) or "type" in schema:
        return not isinstance(schema, dict) or schema["type"] == "string"
    return not any(word in schema for word in _OPEN_SCHEMAS)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _json(text: str) -> str:
    """A value as JSON; what is none is a text."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return _quoted(text)
    return text.strip()
