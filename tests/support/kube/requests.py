"""What clients asked: a bounded list of requests and counters that are not bounded.

So that a test can say: for a minute, nothing but the Lease was written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

MUTATING = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_KEPT = 20_000


@dataclass(frozen=True)
class Request:
    verb: str
    """get, list, watch, create, update, patch, delete, deletecollection."""
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    user: str
    user_agent: str
    manager: str
    code: int

    @property
    def is_mutating(self) -> bool:
        return self.verb in MUTATING


class RequestLog:
    def __init__(self) -> None:
        self.recent: deque[Request] = deque(maxlen=_KEPT)
        self.total = 0
        self.by_verb: Counter[str] = Counter()
        self.by_code: Counter[int] = Counter()
        self.by_verb_and_resource: Counter[tuple[str, str]] = Counter()

    def add(self, request: Request) -> None:
        self.recent.append(request)
        self.total += 1
        self.by_verb[request.verb] += 1
        self.by_code[request.code] += 1
        resource = f"{request.resource}/{request.subresource}" if request.subresource else request.resource
        self.by_verb_and_resource[(request.verb, resource)] += 1

    def since(self, total: int) -> list[Request]:
        """The requests after the first `total` (which `total` told earlier)."""
        wanted = self.total - total
        if wanted > len(self.recent):
            raise LookupError(f"only the last {len(self.recent)} of {wanted} requests were kept; ask more often")
        return list(self.recent)[len(self.recent) - wanted :]

    def mutating(self, since: int = 0, *, but: Iterable[str] = ("leases",)) -> list[Request]:
        """Requests that write, other than those about the resources named in `but`."""
        return [each for each in self.since(since) if each.is_mutating and each.resource not in set(but)]
