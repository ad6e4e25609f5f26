"""What an answer's text turns out to be, in order: prose, reasoning, and calls of tools."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text for the reader."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text of what the model thought before it answered."""

    text: str


class CallBegun(msgspec.Struct, frozen=True, gc=False):
    """A call of a tool, whose name is known. Calls of one answer are counted from 0."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of the arguments of the call that has begun last: JSON text, as the model wrote it."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True, gc=False):
    """Nothing more belongs to the call."""

    index: int


Event: TypeAlias = Content | Reasoning | CallBegun | CallArguments | CallEnded


class Parser(Protocol):
    """Reads one answer as it comes.

    What it tells in all is a function of the whole text, however that was cut; it keeps back only what may still turn
    out to be mark-up, and no text is lost: mark-up that leads to nothing is prose.
    """

    def push(self, text: str) -> list[Event]:
        """The next piece of the text, and what is certain by now."""

    def end(self) -> list[Event]:
        """No text follows: what was kept back."""
