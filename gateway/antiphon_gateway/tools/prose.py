"""The text between calls of tools.

White space around a call belongs to its mark-up (templates write a line's end there), so it is kept back until
something else follows: a call takes it away, anything else shows it.
"""

from __future__ import annotations

from antiphon_gateway.tools.events import Content, Event
from antiphon_gateway.tools.marks import SPACE


class Prose:
    """Owned by one parser. Its methods append what is certain to `events`."""

    __slots__ = ("_after_call", "_space")

    def __init__(self) -> None:
        self._space = ""
        self._after_call = False

    def text(self, text: str, events: list[Event]) -> None:
        if self._after_call:
            text = text.lstrip(SPACE)
            if not text:
                return
            self._after_call = False
        shown = text.rstrip(SPACE)
        if not shown:
            self._space += text
            return
        events.append(Content(self._space + shown))
        self._space = text[len(shown) :]

    def call(self) -> None:
        """A call stands here."""
        self._space = ""
        self._after_call = True

    def end(self, events: list[Event]) -> None:
        if self._space:
            events.append(Content(self._space))
            self._space = ""
