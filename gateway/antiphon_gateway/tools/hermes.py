"""Hermes, and Qwen after it: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several, amid prose."""

from __future__ import annotations

from antiphon_gateway.tools.events import Event
from antiphon_gateway.tools.marks import split
from antiphon_gateway.tools.steps import StepParser

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
MARKS = (OPEN, CLOSE)


class HermesParser(StepParser):
    def _outside(self, events: list[Event]) -> bool:
        found = split(self._text, (OPEN,))
        self._prose.text(found.before, events)
        self._text = found.rest
        if found.mark:
            self._begin_object()
            self._step = self._inside
        return bool(found.mark)

    def _inside(self, events: list[Event]) -> bool:
        reading = self._read_object(events)
        if reading is None:
            return False
        if reading.begun:
            self._step = self._after
        else:
            self._prose.text(OPEN, events)
            self._step = self._outside
        return True

    def _after(self, events: list[Event]) -> bool:
        """Behind a call: its end's mark is awaited, and some models forget it."""
        found = split(self._text, MARKS)
        self._prose.text(found.before, events)
        self._text = found.rest
        if found.mark == OPEN:
            self._begin_object()
            self._step = self._inside
        elif found.mark:
            self._step = self._outside
        return bool(found.mark)

    def _at_end(self, events: list[Event]) -> None:
        if self._object is not None and not self._object.begun:
            self._prose.text(OPEN, events)
