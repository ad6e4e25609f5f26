"""Chats that grow by a turn, of a wanted length at their last one.

The words are those of the project's own pages (`docs/`): prose, tables and code. No two chats and no two messages of a
chat have the same text, so whatever is found in a cache was brought by an earlier turn of the same chat.
"""

from __future__ import annotations

import random
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
TURNS = 8
_PIECE_CHARACTERS = 40

Message = dict[str, str]


def corpus() -> str:
    return "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))


class Chats:
    """Texts are drawn by a seed, so a run can be repeated on the same pages."""

    def __init__(self, text: str, seed: int = 1) -> None:
        self._text = text
        self._random = random.Random(seed)

    def chat(self, characters: int) -> list[Message]:
        """A system prompt, and as many turns as there are: the last prompt has about that many characters.

        Turn k of it is its first 2k messages: the system prompt, k questions and the k-1 answers between them.
        """
        each = characters // (2 * TURNS)
        messages = [{"role": "system", "content": self._words(each)}]
        for turn in range(TURNS):
            messages.append({"role": "user", "content": self._words(each)})
            if turn < TURNS - 1:
                messages.append({"role": "assistant", "content": self._words(each)})
        return messages

    def _words(self, characters: int) -> str:
        """Cut from many places of the pages, so that no text comes again."""
        parts: list[str] = []
        size = 0
        while size < characters:
            at = self._random.randrange(len(self._text) - _PIECE_CHARACTERS)
            parts.append(self._text[at : at + _PIECE_CHARACTERS])
            size += len(parts[-1])
        return "".join(parts)[:characters]
