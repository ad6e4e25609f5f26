"""Which request is done what to: scripted faults first, then chance by a seed.

Pure but for the random source, which a seed fixes: the n-th request of the same kind meets the same fate.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Seen:
    """What a proxy can tell of a request by its method and path."""

    verb: str
    resource: str
    subresource: str
    namespace: str
    name: str

    @property
    def is_watch(self) -> bool:
        return self.verb == "watch"


def seen(method: str, path: str, query: dict[str, str]) -> Seen:
    parts = [part for part in path.split("/") if part]
    rest = parts[2:] if parts[:1] == ["api"] else parts[3:] if parts[:1] == ["apis"] else []
    namespace = ""
    if len(rest) >= 3 and rest[0] == "namespaces" and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    resource, name, subresource = [*rest, "", "", ""][:3]
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete" if name else "deletecollection"}
    verb = verbs.get(method, "get" if name or not resource else "list")
    if method == "GET" and query.get("watch", "").lower() in ("true", "1"):
        verb = "watch"
    return Seen(verb, resource, subresource, namespace, name)


@dataclass(frozen=True)
class Fault:
    """What is done to one request. The default does nothing."""

    latency_s: float = 0.0
    status: int = 0
    """Answered by the proxy itself; the server never sees it. On a watch, 410 is the ERROR event of a real server."""
    retry_after_s: int | None = None
    disconnect: bool = False
    """The connection is cut without an answer, before the server sees the request."""
    lose_answer: bool = False
    """The server does what was asked, and then the connection is cut: the client cannot know."""
    drop_after_s: float | None = None
    """For a watch: its connection is cut so long after its stream began."""


NOTHING = Fault()


@dataclass(frozen=True)
class Match:
    """Which requests; an empty field is any."""

    verb: str = ""
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""

    def fits(self, what: Seen) -> bool:
        return all(
            mine in ("", theirs)
            for mine, theirs in (
                (self.verb, what.verb),
                (self.resource, what.resource),
                (self.subresource, what.subresource),
                (self.namespace, what.namespace),
                (self.name, what.name),
            )
        )


@dataclass(frozen=True)
class Chances:
    """Probabilities for each request, between 0 and 1, and a range of latency."""

    too_many_requests: float = 0.0
    server_error: float = 0.0
    conflict: float = 0.0
    """Of requests that write."""
    disconnect: float = 0.0
    lose_answer: float = 0.0
    """Of requests that write."""
    gone: float = 0.0
    """Of watches."""
    drop_watch_after_s: tuple[float, float] | None = None
    latency_s: tuple[float, float] = (0.0, 0.0)
    retry_after_s: int = 1


@dataclass
class _Scripted:
    fault: Fault
    when: Match
    left: int
    skip: int


@dataclass
class Faults:
    seed: int = 0
    _script: list[_Scripted] = field(default_factory=list)
    _chances: Chances | None = None
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def script(self, fault: Fault, *, when: Match | None = None, times: int = 1, skip: int = 0) -> None:
        """Do this to the next `times` requests that match, after the first `skip` of them."""
        self._script.append(_Scripted(fault, when or Match(), times, skip))

    def at_random(self, chances: Chances | None) -> None:
        """From now on; None: no more."""
        self._chances = chances

    def clear(self) -> None:
        self._script.clear()
        self._chances = None

    @property
    def unused(self) -> int:
        """Scripted faults that no request has met yet."""
        return sum(each.left for each in self._script)

    def for_request(self, what: Seen) -> Fault:
        for scripted in self._script:
            if not scripted.when.fits(what):
                continue
            if scripted.skip:
                scripted.skip -= 1
                continue
            scripted.left -= 1
            if not scripted.left:
                self._script.remove(scripted)
            return scripted.fault
        return self._by_chance(what) if self._chances else NOTHING

    def _by_chance(self, what: Seen) -> Fault:
        chances = self._chances or Chances()
        writes = what.verb in ("create", "update", "patch", "delete", "deletecollection")
        fate, latency_s = self._random.random(), self._random.uniform(*chances.latency_s)
        fates = [
            (chances.too_many_requests, Fault(latency_s, 429, chances.retry_after_s)),
            (chances.server_error, Fault(latency_s, 500)),
            (chances.disconnect, Fault(latency_s, disconnect=True)),
            (chances.conflict if writes else 0.0, Fault(latency_s, 409)),
            (chances.lose_answer if writes else 0.0, Fault(latency_s, lose_answer=True)),
            (chances.gone if what.is_watch else 0.0, Fault(latency_s, 410)),
        ]
        for chance, fault in fates:
            if fate < chance:
                return fault
            fate -= chance
        if what.is_watch and chances.drop_watch_after_s is not None:
            return Fault(latency_s, drop_after_s=self._random.uniform(*chances.drop_watch_after_s))
        return Fault(latency_s) if latency_s else NOTHING
