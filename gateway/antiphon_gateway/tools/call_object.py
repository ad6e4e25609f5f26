"""A call written as a JSON object, `{"name": NAME, "arguments": {...}}`, read as it comes.

The call begins once its name and the first character of its arguments are there, and its arguments are told as they
come. Keys may stand in any order; others than these are passed over. What breaks the form before the call has begun
makes the whole object prose; afterwards it ends the call, which cannot be taken back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from enum import Enum, auto

import msgspec

from antiphon_gateway.tools.events import CallArguments, CallBegun, CallEnded, Event
from antiphon_gateway.tools.json_value import ValueEnd
from antiphon_gateway.tools.marks import SPACE

MAX_NAME_CHARACTERS = 256
"""Of a name or a key: a longer one is none."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BROKEN_STRING = re.compile(r"[\x00-\x1f]")
_SCALAR = re.compile(r"[-+0-9.a-zA-Z]*")
_ARGUMENTS = ("arguments", "parameters")


class _At(Enum):
    START = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    NAME = auto()
    VALUE = auto()
    IN_ARGUMENTS = auto()
    """An object, told as it comes."""
    IN_VALUE = auto()
    """A value that is needed whole, or not at all."""
    IN_SCALAR = auto()
    AFTER_VALUE = auto()
    DONE = auto()
    BROKEN = auto()


class CallObject:
    """One object. `push` until `done` or `broken`; then `rest` is what follows it."""

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        """`names`: of the tools that may be called; None: any."""
        self.rest = ""
        self.raw = ""
        """All that came while the call had not begun."""
        self.begun = False
        self._index = index
        self._names = names
        self._at = _At.START
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None
        """Complete arguments that came before the name."""
        self._value = ValueEnd()
        self._scanned = 0
        self._steps: dict[_At, Callable[[list[Event]], bool]] = {
            _At.START: self._start,
            _At.FIRST_KEY: self._first_key,
            _At.KEY: self._take_key,
            _At.COLON: self._colon,
            _At.NAME: self._take_name,
            _At.VALUE: self._begin_value,
            _At.IN_ARGUMENTS: self._tell_arguments,
            _At.IN_VALUE: self._take_value,
            _At.IN_SCALAR: self._take_scalar,
            _At.AFTER_VALUE: self._after_value,
        }

    @property
    def done(self) -> bool:
        return self._at is _At.DONE

    @property
    def broken(self) -> bool:
        return self._at is _At.BROKEN

    def push(self, text: str, events: list[Event]) -> None:
        if not self.begun:
            self.raw += text
        self.rest += text
        while (step := self._steps.get(self._at)) is not None and step(events):
            pass

    def end(self, events: list[Event]) -> None:
        """No text follows."""
        if self.begun and not self.done and not self.broken:
            self._at = _At.BROKEN
            events.append(CallEnded(self._index))

    # -- steps: each takes what it can of `rest`; False: it needs more text

    def _start(self, events: list[Event]) -> bool:
        return self._sign("{", _At.FIRST_KEY, events)

    def _first_key(self, events: list[Event]) -> bool:
        if not self._skip_space():
            return False
        if self.rest[0] == "}":
            return self._break(events)
        self._at = _At.KEY
        return True

    def _take_key(self, events: list[Event]) -> bool:
        key = self._short_string(events)
        if key is None:
            return self.broken
        self._key, self._at = key, _At.COLON
        return True

    def _colon(self, events: list[Event]) -> bool:
        is_name = self._key == "name" and self._name is None
        return self._sign(":", _At.NAME if is_name else _At.VALUE, events)

    def _take_name(self, events: list[Event]) -> bool:
        name = self._short_string(events)
        if name is None:
            return self.broken
        if not name or (self._names is not None and name not in self._names):
            return self._break(events)
        self._name, self._at = name, _At.AFTER_VALUE
        if self._arguments is not None:
            self._begin(events)
            events.append(CallArguments(self._index, self._arguments))
        return True

    def _begin_value(self, events: list[Event]) -> bool:
        if not self._skip_space():
            return False
        first, self._value, self._scanned = self.rest[0], ValueEnd(), 0
        if first == "{" and self._is_arguments and self._name is not None:
            self._begin(events)
            self._at = _At.IN_ARGUMENTS
        elif first == "{" or first == '"' or (first == "[" and not self._is_arguments):
            self._at = _At.IN_VALUE
        elif first == "[":
            return self._break(events)
        else:
            self._at = _At.IN_SCALAR
        return True

    def _tell_arguments(self, events: list[Event]) -> bool:
        end = self._value.push(self.rest, 0)
        if end:
            events.append(CallArguments(self._index, self.rest[:end]))
        self.rest = self.rest[end:]
        if self._value.broken:
            return self._break(events)
        if self._value.done:
            self._at = _At.AFTER_VALUE
        return self._value.done

    def _take_value(self, events: list[Event]) -> bool:
        self._scanned = self._value.push(self.rest, self._scanned)
        if self._value.broken:
            return self._break(events)
        if not self._value.done:
            return False
        value, self.rest = self.rest[: self._scanned], self.rest[self._scanned :]
        return self._take_arguments(value, events) if self._is_arguments else self._next()

    def _take_scalar(self, events: list[Event]) -> bool:
        match = _SCALAR.match(self.rest)
        end = match.end() if match is not None else 0
        if end > MAX_NAME_CHARACTERS:
            return self._break(events)
        if end == len(self.rest):
            return False
        value, self.rest = self.rest[:end], self.rest[end:]
        if not value or (self._is_arguments and value != "null"):
            return self._break(events)
        return self._take_arguments("{}", events) if self._is_arguments else self._next()

    def _after_value(self, events: list[Event]) -> bool:
        if not self._skip_space():
            return False
        sign = self.rest[0]
        if sign not in ",}" or (sign == "}" and self._name is None):
            return self._break(events)
        self.rest = self.rest[1:]
        if sign == ",":
            self._at = _At.KEY
            return True
        if not self.begun:
            self._begin(events)
            events.append(CallArguments(self._index, "{}"))
        self._at = _At.DONE
        events.append(CallEnded(self._index))
        return True

    # -- parts of steps

    @property
    def _is_arguments(self) -> bool:
        return self._key in _ARGUMENTS and not self.begun and self._arguments is None

    def _next(self) -> bool:
        self._at = _At.AFTER_VALUE
        return True

    def _take_arguments(self, value: str, events: list[Event]) -> bool:
        """Complete arguments: an object, or a string that holds one."""
        if value[0] == '"':
            try:
                value = msgspec.json.decode(value, type=str).strip() or "{}"
            except msgspec.MsgspecError:
                return self._break(events)
            if value[0] != "{":
                return self._break(events)
        if self._name is None:
            self._arguments = value
        else:
            self._begin(events)
            events.append(CallArguments(self._index, value))
        return self._next()

    def _begin(self, events: list[Event]) -> None:
        self.begun, self.raw = True, ""
        events.append(CallBegun(self._index, self._name or ""))

    def _break(self, events: list[Event]) -> bool:
        self._at = _At.BROKEN
        if self.begun:
            events.append(CallEnded(self._index))
        return True

    def _skip_space(self) -> bool:
        """Whether anything else is there."""
        self.rest = self.rest.lstrip(SPACE)
        return bool(self.rest)

    def _sign(self, sign: str, then: _At, events: list[Event]) -> bool:
        if not self._skip_space():
            return False
        if self.rest[0] != sign:
            return self._break(events)
        self.rest, self._at = self.rest[1:], then
        return True

    def _short_string(self, events: list[Event]) -> str | None:
        """A key or a name; None: it is not there yet, or broken."""
        if not self._skip_space():
            return None
        match = _STRING.match(self.rest, 0, MAX_NAME_CHARACTERS + 2)
        if match is None:
            begun = self.rest[: MAX_NAME_CHARACTERS + 2]
            if begun[0] != '"' or _BROKEN_STRING.search(begun) or len(begun) > MAX_NAME_CHARACTERS + 1:
                self._break(events)
            return None
        try:
            text: str = msgspec.json.decode(match[0], type=str)
        except msgspec.MsgspecError:
            self._break(events)
            return None
        self.rest = self.rest[match.end() :]
        return text
