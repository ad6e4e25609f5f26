"""Answers of /v1/responses that are kept: to be read again, to be deleted, and for `previous_response_id`.

In this gateway's memory, each for its tenant alone. Bounded by number and bytes, oldest out first, and by age. The
conversation behind an answer is a tuple of turns, each the JSON of its items: an answer that follows another one holds
that one's turns too, so that it stands when the other is forgotten, and a turn that several hold is counted once.
Owned by the gateway; used on its event loop only.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_ENTRY_BYTES = 1024
"""About, of what an entry has beside its texts."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    response_id: str
    tenant: str
    page: bytes
    """The answer as its client got it."""
    turns: tuple[bytes, ...]
    """All items of the conversation up to it, in order: JSON lists."""


class ResponseStore:
    """See the module. Time is O(turns) for each answer."""

    def __init__(
        self,
        responses: int,
        max_bytes: int,
        keep_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`responses` or `keep_s` 0: nothing is kept."""
        self.size_bytes = 0
        """About."""
        self._most = responses
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()
        """With the time from which it is there no more: oldest first in both ways."""
        self._holders: dict[int, int] = {}
        """How many answers hold a turn, by its identity."""

    @property
    def keeps(self) -> bool:
        """Whether there is room for anything at all."""
        return self._most > 0 and self._max_bytes > 0 and self._keep_s > 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, response: StoredResponse) -> bool:
        """False: it alone is larger than all that may be kept."""
        alone = _ENTRY_BYTES + len(response.page) + sum(len(turn) for turn in response.turns)
        if not self.keeps or alone > self._max_bytes:
            return False
        self._kept[response.response_id] = (self._clock() + self._keep_s, response)
        self.size_bytes += _ENTRY_BYTES + len(response.page)
        for turn in response.turns:
            holders = self._holders.get(id(turn), 0)
            self._holders[id(turn)] = holders + 1
            if not holders:
                self.size_bytes += len(turn)
        while len(self._kept) > self._most or self.size_bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))
        return True

    def find(self, response_id: str, tenant: str) -> StoredResponse | None:
        """None also where it is another tenant's."""
        self.expire()
        found = self._kept.get(response_id)
        return found[1] if found is not None and found[1].tenant == tenant else None

    def delete(self, response_id: str, tenant: str) -> bool:
        """Whether it was there. What followed it keeps its turns."""
        if self.find(response_id, tenant) is None:
            return False
        self._forget(response_id)
        return True

    def expire(self) -> None:
        """Forget what is too old."""
        now = self._clock()
        while self._kept:
            response_id, (until, _) = next(iter(self._kept.items()))
            if until > now:
                return
            self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        _, response = self._kept.pop(response_id)
        self.size_bytes -= _ENTRY_BYTES + len(response.page)
        for turn in response.turns:
            holders = self._holders.pop(id(turn)) - 1
            if holders:
                self._holders[id(turn)] = holders
            else:
                self.size_bytes -= len(turn)
