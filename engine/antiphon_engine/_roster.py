"""The roster: which requests there are, in which phase, and what leaves when. Owned by the scheduler; no decisions.

A request that is removed while steps in flight use its blocks is gone for everybody at once, but its blocks stay until
the last of those steps has been committed: it is *leaving*.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from antiphon_engine._request import Phase, Request
from antiphon_engine._room import KvRoom
from antiphon_engine.interface import IntegrityError, IntegrityReport
from antiphon_engine.pool import BlockPool


class Roster:
    def __init__(self, pool: BlockPool, room: KvRoom) -> None:
        self._pool = pool
        self._room = room
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        """By arrival, so that a preempted request goes back to the front."""
        self.running: list[Request] = []
        """In order of admission."""
        self._leaving: list[Request] = []
        self._arrivals = 0

    @property
    def leaving_ids(self) -> frozenset[str]:
        """Of requests whose steps are in flight still. A new request of the same name waits for their end."""
        return frozenset(request.request_id for request in self._leaving)

    @property
    def queued_tokens(self) -> int:
        return sum(request.missing_tokens for request in self.waiting)

    def add(self, request: Request) -> None:
        self._arrivals += 1
        request.arrival = self._arrivals
        self.requests[request.request_id] = request

    def held(self, request_id: str) -> Request:
        request = self.requests.get(request_id)
        if request is None or request.phase is not Phase.HELD:
            raise KeyError(f"request {request_id} is gone or not held any more")
        return request

    def enqueue(self, request: Request) -> None:
        request.phase = Phase.WAITING
        insort(self.waiting, request, key=_arrival)

    def run(self, request: Request) -> None:
        self.waiting.remove(request)
        request.phase = Phase.RUNNING
        self.running.append(request)

    def keep(self, request: Request) -> None:
        self.running.remove(request)
        request.phase = Phase.KEPT

    def preempt(self, request: Request) -> None:
        """Back to the queue without its room. It must not be in flight."""
        self.running.remove(request)
        self.reset(request)
        request.preempted = True
        self.enqueue(request)

    def reset(self, request: Request) -> None:
        """Without room and from the beginning, or from what the cache will have of it then."""
        self._room.free(request)
        request.computed_tokens = request.indexed_blocks = 0

    def remove(self, request: Request) -> None:
        del self.requests[request.request_id]
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        elif request.phase is Phase.RUNNING:
            self.running.remove(request)
        request.phase = Phase.OVER
        if request.flights:
            self._leaving.append(request)
        else:
            self._room.free(request)

    def land(self, request: Request, num_tokens: int) -> bool:
        """A step with so many of its tokens is over. False if it was removed meanwhile; its last step frees it."""
        request.end_flight(num_tokens)
        if request.phase is not Phase.OVER:
            return True
        if not request.flights:
            self._leaving.remove(request)
            self._room.free(request)
        return False

    def integrity_check(self) -> Callable[[], IntegrityReport]:
        """Check what requests have. What is returned checks the pool as it was then: it takes longer, and no lock.

        Both raise IntegrityError.
        """
        alive = [*self.requests.values(), *self._leaving]
        references = Counter(block for request in alive for block in request.blocks)
        outstanding = sum(request.outstanding_blocks for request in alive)
        if outstanding != self._room.outstanding_blocks:
            raise IntegrityError(
                f"{outstanding} blocks are promised, {self._room.outstanding_blocks} are counted as such"
            )
        if len(references) + outstanding > self._pool.num_blocks:
            raise IntegrityError(f"{len(references)} blocks are taken and {outstanding} promised: more than there are")
        for phase, listed in ((Phase.WAITING, self.waiting), (Phase.RUNNING, self.running)):
            if {r for r in self.requests.values() if r.phase is phase} != set(listed):
                raise IntegrityError(f"the list of {phase.value} requests is not the set of them")
        for request in alive:
            if bool(request.flights) != bool(request.flying_tokens) or min(request.flights, request.flying_tokens) < 0:
                raise IntegrityError(
                    f"{request.flying_tokens} tokens of {request.request_id} are in flight in {request.flights} steps"
                )
        return partial(_check_pool, self._pool.copy(), references, len(alive))


def _check_pool(pool: BlockPool, references: Mapping[int, int], requests: int) -> IntegrityReport:
    free, cached, used = pool.check(references)
    return IntegrityReport(free, cached, used, pool.num_blocks, requests)


def _arrival(request: Request) -> int:
    return request.arrival
