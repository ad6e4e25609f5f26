"""Finding mark-up in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

SPACE = " \t\r\n"
"""What JSON and the formats around it take for white space."""


class Split(msgspec.Struct, frozen=True, gc=False):
    """A text at its first mark."""

    before: str
    mark: str
    """Empty: there is none yet."""
    rest: str
    """What follows the mark; without one, an end that may be the beginning of one."""


def split(text: str, marks: Sequence[str]) -> Split:
    """At the first of the marks. No mark may be the beginning of another one."""
    first, found = len(text), ""
    for mark in marks:
        place = text.find(mark, 0, first + len(mark))
        if 0 <= place < first:
            first, found = place, mark
    if found:
        return Split(text[:first], found, text[first + len(found) :])
    kept = begun(text, marks)
    return Split(text[:-kept], "", text[-kept:]) if kept else Split(text, "", "")


def begun(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a mark, and not the whole of it."""
    longest = 0
    for mark in marks:
        place = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while place >= 0 and not mark.startswith(text[place:]):
            place = text.find(mark[0], place + 1)
        if place >= 0:
            longest = max(longest, len(text) - place)
    return longest


def may_become(text: str, mark: str) -> bool:
    """Whether more text could make `text` begin with `mark`, with which it does not begin yet."""
    return len(text) < len(mark) and mark.startswith(text)
