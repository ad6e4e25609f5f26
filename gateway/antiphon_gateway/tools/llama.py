"""Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, perhaps several with `;` between them, perhaps
after `<|python_tag|>`.

Nothing marks such a call but its form, and an answer may be JSON for other reasons: it is a call only where it names a
tool that the request offers.
"""

from __future__ import annotations

from collections.abc import Collection

from antiphon_gateway.tools.events import Event
from antiphon_gateway.tools.marks import SPACE, may_become
from antiphon_gateway.tools.steps import StepParser

TAG = "<|python_tag|>"
MARKS = (TAG,)


class LlamaParser(StepParser):
    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the tools that the request offers."""
        super().__init__()
        self._names = names
        self._before = ""
        """White space and mark before the object: prose, should it be none."""

    def _outside(self, events: list[Event]) -> bool:
        """Where a call may begin: before everything else, or behind a call."""
        rest = self._text.lstrip(SPACE)
        if self._calls and rest.startswith(";"):
            rest = rest[1:].lstrip(SPACE)
        tag = rest.startswith(TAG)
        inner = rest[len(TAG) :].lstrip(SPACE) if tag else rest
        if not inner or (not tag and may_become(inner, TAG)):
            return False
        if inner[0] != "{":
            self._step = self._plain
            return True
        self._before = self._text[: len(self._text) - len(inner)]
        self._text = inner
        self._begin_object(self._names)
        self._step = self._inside
        return True

    def _inside(self, events: list[Event]) -> bool:
        reading = self._read_object(events)
        if reading is None:
            return False
        if not reading.begun:
            self._text = self._before + self._text
        self._step = self._outside if reading.done else self._plain
        return True

    def _plain(self, events: list[Event]) -> bool:
        """No call follows any more."""
        self._prose.text(self._text, events)
        self._text = ""
        return False

    def _at_end(self, events: list[Event]) -> None:
        if self._object is not None and not self._object.begun:
            self._prose.text(self._before, events)
