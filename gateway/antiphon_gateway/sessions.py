"""Where the last request of a session went: a hint for the next one, never more.

A client names its session in `x-session-id`. The pair of workers that served it last wins where it is as good as the
cheapest (`RouteRequest.hint`); what decides is always cache and load. Bounded: the sessions used last are kept.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_SESSIONS = 20_000
MAX_ID_CHARACTERS = 128
"""A longer id is no session."""

Pair = tuple[str, str]
"""(decode worker, prefill worker or empty)"""


class Sessions:
    """Keys are (model, tenant, session id): ids of two tenants never meet."""

    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        self._limit = limit
        self._pairs: OrderedDict[tuple[str, str, str], Pair] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pairs)

    def last(self, model: str, tenant: str, session: str) -> Pair | None:
        return self._pairs.get((model, tenant, session)) if session else None

    def went(self, model: str, tenant: str, session: str, pair: Pair) -> None:
        if not session:
            return
        self._pairs[model, tenant, session] = pair
        self._pairs.move_to_end((model, tenant, session))
        if len(self._pairs) > self._limit:
            self._pairs.popitem(last=False)
