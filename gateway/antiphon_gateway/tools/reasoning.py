"""Reasoning, told apart from the answer: what stands between two marks at the answer's beginning.

Some templates open the reasoning themselves, and the answer begins in its middle. Line ends next to the marks belong
to them, as templates write and take them away. Marks further on are the model's own words: an answer reasons once, and
before all else.
"""

from __future__ import annotations

from antiphon_gateway.tools.events import Content, Event, Reasoning
from antiphon_gateway.tools.marks import SPACE, may_become, split

_LINE_ENDS = "\r\n"


class ReasoningParser:
    """A `Parser` that tells `Reasoning` and `Content`."""

    def __init__(self, opening: str, closing: str, *, inside: bool) -> None:
        """`inside`: the prompt has opened the reasoning."""
        self._opening = opening
        self._closing = closing
        self._text = ""
        self._at_start = not inside
        self._inside = inside
        self._reopens = inside
        """Some models write the opening mark once more."""
        self._at_edge = inside
        """Just behind a mark: line ends are dropped."""

    @property
    def over(self) -> bool:
        """The answer proper has begun; all that comes goes through as it is."""
        return not (self._at_start or self._inside or self._at_edge)

    def push(self, text: str) -> list[Event]:
        if self.over:
            return [Content(text)] if text else []
        events: list[Event] = []
        self._text += text
        if self._at_start:
            self._start()
        if self._inside:
            self._reason(events)
        if not self._at_start and not self._inside:
            self._answer(events)
        return events

    def _start(self) -> None:
        """Whether the answer begins with reasoning."""
        inner = self._text.lstrip(SPACE)
        if inner.startswith(self._opening):
            self._text = inner[len(self._opening) :]
            self._at_start, self._inside, self._at_edge = False, True, True
        elif not may_become(inner, self._opening):
            self._at_start = False

    def _reason(self, events: list[Event]) -> None:
        if self._at_edge:
            inner = self._text.lstrip(_LINE_ENDS)
            if self._reopens and inner.startswith(self._opening):
                inner, self._reopens = inner[len(self._opening) :].lstrip(_LINE_ENDS), False
            if not inner or (self._reopens and may_become(inner, self._opening)):
                self._text = inner
                return
            self._text, self._at_edge = inner, False
        found = split(self._text, (self._closing,))
        if found.mark:
            shown, self._text = found.before.rstrip(_LINE_ENDS), found.rest
            self._inside, self._at_edge = False, True
        else:
            shown = found.before.rstrip(_LINE_ENDS)
            self._text = self._text[len(shown) :]
        if shown:
            events.append(Reasoning(shown))

    def _answer(self, events: list[Event]) -> None:
        shown = self._text.lstrip(_LINE_ENDS) if self._at_edge else self._text
        if shown:
            events.append(Content(shown))
            self._text, self._at_edge = "", False

    def end(self) -> list[Event]:
        text, self._text = self._text, ""
        if self._inside:
            text = text.lstrip(_LINE_ENDS) if self._at_edge else text
            return [Reasoning(text)] if text else []
        return [Content(text)] if text and not self._at_edge else []
