"""What a request forbids itself, in forms that are made once a request and cost a step next to nothing.

`AllowedIds` are the only ids that it may sample; `WordBans` are sequences that its output never completes. Both are
functions of the request and its output alone, so an answer that goes on elsewhere is limited there in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class AllowedIds:
    """Ascending, each once."""

    __slots__ = ("ids", "packed")

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids: NDArray[np.int64] = np.unique(np.fromiter(ids, dtype=np.int64))
        self.packed = self.ids.astype(np.int32).tobytes()
        """As they are sent to ranks."""

    @staticmethod
    def unpacked(packed: bytes) -> AllowedIds:
        return AllowedIds(np.frombuffer(packed, dtype=np.int32).tolist())


class WordBans:
    """Of one request. Words are token ids; empty ones forbid nothing."""

    __slots__ = ("_after", "_always")

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._always = frozenset(word[0] for word in words if len(word) == 1)
        self._after: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        """By the last but one token of a longer word: what comes before its last token, and that."""
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append((tuple(word[:-1]), word[-1]))

    def forbidden_after(self, output: Sequence[int]) -> frozenset[int]:
        """What would complete a word, as the next token."""
        longer = self._after.get(output[-1]) if output else None
        if longer is None:
            return self._always
        return self._always.union(
            last for before, last in longer if tuple(output[max(0, len(output) - len(before)) :]) == before
        )
