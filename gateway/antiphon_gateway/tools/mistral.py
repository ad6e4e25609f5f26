"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since its v11 tokenizer one mark for each call:
`[TOOL_CALLS]NAME[ARGS]{...}`, where `[ARGS]` may be missing and `[CALL_ID]ID` may stand before it."""

from __future__ import annotations

from antiphon_gateway.tools.call_object import MAX_NAME_CHARACTERS
from antiphon_gateway.tools.events import Event
from antiphon_gateway.tools.marks import SPACE, split
from antiphon_gateway.tools.steps import StepParser, is_name

CALLS = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
MARKS = (CALLS, ARGS, CALL_ID)

_BRACE = "{"


class MistralParser(StepParser):
    def __init__(self) -> None:
        super().__init__()
        self._head = ""
        """What has been taken since the mark and is prose, should no call come of it."""
        self._name = ""

    def _outside(self, events: list[Event]) -> bool:
        found = split(self._text, (CALLS,))
        self._prose.text(found.before, events)
        self._text = found.rest
        if found.mark:
            self._head, self._step = CALLS, self._which
        return bool(found.mark)

    def _which(self, events: list[Event]) -> bool:
        """A list of objects, or one call's name."""
        inner = self._text.lstrip(SPACE)
        if not inner:
            return False
        if inner[0] != "[":
            self._step = self._take_name
            return True
        after = inner[1:].lstrip(SPACE)
        if not after:
            return False
        if after[0] != "{":
            return self._no_call(events)
        self._head += self._text[: len(self._text) - len(after)]
        self._text = after
        return self._next_object()

    # -- a list of objects

    def _next_object(self) -> bool:
        self._begin_object()
        self._step = self._inside
        return True

    def _inside(self, events: list[Event]) -> bool:
        reading = self._read_object(events)
        if reading is None:
            return False
        if not reading.begun:
            return self._no_call(events)
        self._head = ""
        self._step = self._after if reading.done else self._outside
        return True

    def _after(self, events: list[Event]) -> bool:
        """Behind an object: a comma and another one, or the list's end."""
        inner = self._text.lstrip(SPACE)
        if inner[:1] == ",":
            following = inner[1:].lstrip(SPACE)
            if not following:
                return False
            if following[0] == "{":
                self._head = self._text[: len(self._text) - len(following)]
                self._text = following
                return self._next_object()
        elif not inner:
            return False
        self._text = inner[1:] if inner[0] == "]" else inner
        self._step = self._outside
        return True

    # -- one call, its name first

    def _take_name(self, events: list[Event]) -> bool:
        found = split(self._text, (ARGS, CALL_ID, _BRACE))
        begun = found.before.lstrip(SPACE)
        name = begun.rstrip(SPACE)
        if not is_name(name, begun) or (found.mark and not name):
            return self._no_call(events)
        if not found.mark:
            return False
        self._name = name
        taken = found.before if found.mark == _BRACE else found.before + found.mark
        self._head += taken
        self._text = self._text[len(taken) :]
        self._step = self._take_id if found.mark == CALL_ID else self._to_arguments
        return True

    def _take_id(self, events: list[Event]) -> bool:
        """Its id is the model's own and stays here: the client is told another one."""
        found = split(self._text, (ARGS,))
        if len(found.before) > MAX_NAME_CHARACTERS:
            return self._no_call(events)
        if not found.mark:
            return False
        self._head += found.before + ARGS
        self._text = found.rest
        self._step = self._to_arguments
        return True

    def _to_arguments(self, events: list[Event]) -> bool:
        inner = self._text.lstrip(SPACE)
        if not inner:
            return False
        if inner[0] != _BRACE:
            return self._no_call(events)
        self._text, self._head = inner, ""
        self._begin_arguments(self._name, events)
        return True

    def _call_ended(self) -> None:
        self._step = self._outside

    def _no_call(self, events: list[Event]) -> bool:
        self._prose.text(self._head, events)
        self._head, self._step = "", self._outside
        return True

    def _at_end(self, events: list[Event]) -> None:
        if self._step == self._after:
            self._text = self._text.lstrip(SPACE)
        elif self._object is None or not self._object.begun:
            self._prose.text(self._head, events)
