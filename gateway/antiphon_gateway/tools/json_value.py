"""Where a JSON value ends, in text that comes in pieces.

Nothing is checked beyond strings and brackets: what a model wrote as arguments goes to the client as it stands, as it
does with OpenAI's own models, and the client finds out whether it is JSON.
"""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')


class ValueEnd:
    """Follows one object, list or string from its first character on."""

    __slots__ = ("_depth", "_escaped", "_in_string", "broken", "done")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.done = False
        self.broken = False
        """The value stops in its middle: mark-up follows (no JSON has a `<` outside of strings)."""

    def push(self, text: str, start: int) -> int:
        """Where in `text`, of which what comes from `start` on is new, the value ends so far."""
        place = start
        while place < len(text):
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, place)
            if match is None:
                return len(text)
            place = match.end()
            sign = match[0]
            if self._in_string:
                if sign == "\\":
                    self._escaped = True
                    continue
                self._in_string = False
            elif sign == '"':
                self._in_string = True
            elif sign == "<":
                self.broken = True
                return match.start()
            else:
                self._depth += 1 if sign in "{[" else -1
            if not self._depth and not self._in_string:
                self.done = True
                return place
        return place
