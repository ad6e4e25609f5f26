"""What the families' parsers share: text that is not read yet, prose, and the count of calls.

A family is a machine of few states. Each state's step takes what it can of `_text` and says whether the next step may
go on; it decides only on what no later text can change, which is why cuts do not matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from antiphon_gateway.tools.call_object import MAX_NAME_CHARACTERS, CallObject
from antiphon_gateway.tools.events import CallArguments, CallBegun, CallEnded, Event
from antiphon_gateway.tools.json_value import ValueEnd
from antiphon_gateway.tools.prose import Prose

_NAME = re.compile(r"[A-Za-z0-9_.:/\-]*")


def is_name(name: str, taken: str) -> bool:
    """Whether `name`, for which `taken` characters have come, may be a tool's name or the beginning of one."""
    return len(taken) <= MAX_NAME_CHARACTERS and _NAME.fullmatch(name) is not None


class StepParser:
    """A `Parser`; a family says its first step and what its text means at the end."""

    def __init__(self) -> None:
        self._text = ""
        self._prose = Prose()
        self._calls = 0
        self._object: CallObject | None = None
        self._value: ValueEnd | None = None
        """The arguments that are being told, of a call whose name stood before them."""
        self._step: Callable[[list[Event]], bool] = self._outside

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        self._text += text
        while self._step(events):
            pass
        return events

    def end(self) -> list[Event]:
        events: list[Event] = []
        self._at_end(events)
        if self._value is not None:
            self._end_call(events)
        if self._object is not None:
            self._object.end(events)
            self._prose.text("" if self._object.begun else self._object.raw, events)
            self._object = None
        self._prose.text(self._text, events)
        self._text = ""
        self._prose.end(events)
        return events

    def _outside(self, events: list[Event]) -> bool:
        """Between calls."""
        raise NotImplementedError

    def _at_end(self, events: list[Event]) -> None:
        """What a state knows of the text that it holds, when nothing follows."""

    # -- a call as an object

    def _begin_object(self, names: Collection[str] | None = None) -> None:
        self._object = CallObject(self._calls, names)

    def _read_object(self, events: list[Event]) -> CallObject | None:
        """Push all there is into the object; the object, once it is done or broken, and then its rest is next."""
        reading = self._object
        assert reading is not None
        begun = reading.begun
        own: list[Event] = []
        reading.push(self._text, own)
        self._text = ""
        if reading.begun and not begun:
            self._prose.call()
            self._calls += 1
        events += own
        if not (reading.done or reading.broken):
            return None
        self._object = None
        self._text = reading.rest if reading.begun else reading.raw
        return reading

    # -- a call as a name, and then its arguments

    def _begin_arguments(self, name: str, events: list[Event]) -> None:
        """The next character is the first one of the arguments, an object."""
        self._prose.call()
        self._value = ValueEnd()
        self._step = self._tell_arguments
        events.append(CallBegun(self._calls, name))

    def _tell_arguments(self, events: list[Event]) -> bool:
        value = self._value
        assert value is not None
        end = value.push(self._text, 0)
        if end:
            events.append(CallArguments(self._calls, self._text[:end]))
        self._text = self._text[end:]
        if not (value.done or value.broken):
            return False
        self._end_call(events)
        self._call_ended()
        return True

    def _end_call(self, events: list[Event]) -> None:
        self._value = None
        events.append(CallEnded(self._calls))
        self._calls += 1

    def _call_ended(self) -> None:
        """Say the step behind such a call."""
        raise NotImplementedError
