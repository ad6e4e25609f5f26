"""One answer, read as it comes: first what was reasoned, then prose and calls."""

from __future__ import annotations

from collections.abc import Iterable

from antiphon_gateway.tools.events import CallArguments, CallBegun, CallEnded, Content, Event, Parser, Reasoning
from antiphon_gateway.tools.reasoning import ReasoningParser


class AnswerParser:
    """A `Parser`, of one choice."""

    def __init__(
        self, reasoning: ReasoningParser | None, calls: Parser | None, *, one_call: bool, with_reasoning: bool
    ) -> None:
        """`one_call`: the answer ends with its first call. `with_reasoning`: it is told, not left out."""
        self.calls = 0
        """How many have begun."""
        self._reasoning = reasoning
        self._tools = calls
        self._one_call = one_call
        self._with_reasoning = with_reasoning
        self._over = False

    @property
    def over(self) -> bool:
        """The one call that was wanted is there; nothing more is told."""
        return self._over

    def push(self, text: str) -> list[Event]:
        if self._over or not text:
            return []
        return self._told(self._read([Content(text)] if self._reasoning is None else self._reasoning.push(text)))

    def end(self) -> list[Event]:
        events = self._read([] if self._reasoning is None else self._reasoning.end())
        if self._tools is not None:
            events += self._tools.end()
        return self._told(events)

    def _read(self, events: list[Event]) -> list[Event]:
        """Prose may hold calls."""
        if self._tools is None:
            return events
        read: list[Event] = []
        for event in events:
            read += self._tools.push(event.text) if isinstance(event, Content) else (event,)
        return read

    def _told(self, events: Iterable[Event]) -> list[Event]:
        """Those for the client, pieces of the same thing joined."""
        told: list[Event] = []
        for event in events:
            if self._over:
                break
            match event:
                case Reasoning() if not self._with_reasoning:
                    continue
                case CallBegun():
                    self.calls += 1
                case CallEnded():
                    self._over = self._one_call
            joined = _join(told[-1], event) if told else None
            if joined is None:
                told.append(event)
            else:
                told[-1] = joined
        return told


def _join(first: Event, second: Event) -> Event | None:
    match first, second:
        case Content(text=before), Content(text=after):
            return Content(before + after)
        case Reasoning(text=before), Reasoning(text=after):
            return Reasoning(before + after)
        case CallArguments(index=index, text=before), CallArguments(text=after):
            return CallArguments(index, before + after)
    return None
