"""Second turns of the reference conversations: a prompt, its answer and new text, with what follows by reference."""

from __future__ import annotations

import functools
from pathlib import Path

from tests.support import reference as first_turn
from tests.support.reference import OUTPUT_TOKENS, Reference, greedy_references

_NEW_TEXT_TOKENS = 150
TURNS = (11, 12, 14, 15, 16)
"""Prompts whose first turn fills several blocks, and that are followed, three on, by one that is long enough to add."""


@functools.cache
def second_turn_references(folder: Path) -> tuple[Reference, ...]:
    """Prompt, answer and 150 tokens more: greedy continuations of these, by `transformers`."""
    turns = greedy_references(folder)
    asked = tuple(
        turns[index].prompt + turns[index].ids + turns[(index + 3) % len(turns)].prompt[:_NEW_TEXT_TOKENS]
        for index in TURNS
    )
    return first_turn.references_of(folder, asked, OUTPUT_TOKENS, None)
