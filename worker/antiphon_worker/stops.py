"""Stop strings over streamed text: nothing of a match is ever sent, and nothing else is held back.

The match that counts is the one that completes first, character by character (of several that end there, the longest).
That makes the result independent of how the text was split into tokens. What is held back is the longest end of the
text that may still become a match; whatever was sent before it can be in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopStep:
    """What one piece of text brought."""

    text: str
    """Safe to send now."""
    matched: str | None
    """The stop string that ended the text; nothing comes after it."""


class StopStrings:
    """Watches the text of one request."""

    def __init__(self, stops: Sequence[str], *, include_stop_text: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include_stop_text
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> StopStep:
        """Take the next piece. `may_stop` False: no match may end within it (too few tokens so far)."""
        if not self._stops:
            return StopStep(text, None)
        known = len(self._held)
        window = self._held + text
        if may_stop:
            match = self._first_match(window, known)
            if match is not None:
                end, stop = match
                self._held = ""
                return StopStep(window[: end if self._include else end - len(stop)], stop)
        keep = self._possible_beginning(window)
        self._held = window[len(window) - keep :]
        return StopStep(window[: len(window) - keep], None)

    def flush(self) -> str:
        """What is held back, when no text follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, window: str, known: int) -> tuple[int, str] | None:
        """(end, stop) of the match that ends first, beyond the `known` leading characters."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            begin = window.find(stop, max(0, known - len(stop) + 1))
            if begin < 0:
                continue
            end = begin + len(stop)
            if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                best = (end, stop)
        return best

    def _possible_beginning(self, window: str) -> int:
        """Length of the longest end of `window` that a stop string begins with."""
        longest = min(len(window), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            tail = window[len(window) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
