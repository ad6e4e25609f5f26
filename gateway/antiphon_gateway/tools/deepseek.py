"""DeepSeek: calls between marks of its own. V3 and R1 write the kind, the name and fenced JSON, V3.1 name and JSON:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>...
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>
"""

from __future__ import annotations

from antiphon_gateway.tools.events import Event
from antiphon_gateway.tools.marks import SPACE, may_become, split
from antiphon_gateway.tools.steps import StepParser, is_name

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```json"
MARKS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

_SILENT = (CALLS_BEGIN, CALLS_END, CALL_END)
"""They only frame: a call is what stands behind CALL_BEGIN."""
_FENCES = (FENCE, "```")


class DeepSeekParser(StepParser):
    def __init__(self) -> None:
        super().__init__()
        self._head = ""
        """What has been taken since CALL_BEGIN and is prose, should no call come of it."""
        self._name = ""

    def _outside(self, events: list[Event]) -> bool:
        found = split(self._text, (CALL_BEGIN, *_SILENT))
        self._prose.text(found.before, events)
        self._text = found.rest
        if found.mark == CALL_BEGIN:
            self._head, self._step = CALL_BEGIN, self._take_kind
        return bool(found.mark)

    def _take_kind(self, events: list[Event]) -> bool:
        """The kind of tool, or already its name."""
        found = split(self._text, (SEPARATOR,))
        begun = found.before.lstrip(SPACE)
        name = begun.rstrip(SPACE)
        if not is_name(name, begun) or (found.mark and not name):
            return self._no_call(events)
        if not found.mark:
            return False
        self._name, self._text = name, found.rest
        self._head += found.before + SEPARATOR
        self._step = self._behind_separator
        return True

    def _behind_separator(self, events: list[Event]) -> bool:
        inner = self._text.lstrip(SPACE)
        if not inner:
            return False
        if inner[0] == "{":
            return self._begin(inner, events)
        self._step = self._take_name
        return True

    def _take_name(self, events: list[Event]) -> bool:
        """Up to the line's end."""
        inner = self._text.lstrip(SPACE)
        line, end, _ = inner.partition("\n")
        name = line.rstrip(SPACE)
        if not is_name(name, line):
            return self._no_call(events)
        if not end:
            return False
        self._name = name
        taken = len(self._text) - len(inner) + len(line)
        self._head, self._text = self._head + self._text[:taken], self._text[taken:]
        self._step = self._behind_name
        return True

    def _behind_name(self, events: list[Event]) -> bool:
        inner = self._text.lstrip(SPACE)
        for fence in _FENCES:
            if inner.startswith(fence):
                inner = inner[len(fence) :].lstrip(SPACE)
                break
            if may_become(inner, fence):
                return False
        if not inner:
            return False
        return self._begin(inner, events) if inner[0] == "{" else self._no_call(events)

    def _begin(self, arguments: str, events: list[Event]) -> bool:
        self._text, self._head = arguments, ""
        self._begin_arguments(self._name, events)
        return True

    def _call_ended(self) -> None:
        self._step = self._close_fence

    def _close_fence(self, events: list[Event]) -> bool:
        fence = _FENCES[-1]
        inner = self._text.lstrip(SPACE)
        if may_become(inner, fence):
            return False
        self._text = inner.removeprefix(fence)
        self._step = self._outside
        return True

    def _no_call(self, events: list[Event]) -> bool:
        self._prose.text(self._head, events)
        self._head, self._step = "", self._outside
        return True

    def _at_end(self, events: list[Event]) -> None:
        self._prose.text(self._head, events)
