"""What turns changes into reconciliations: one queue for all controllers, each key at most once in it.

A controller says which of its keys a change touches, and brings a key to where it should be, returning when to look
again. A refusal by the API is tried again with back-off. Anything else that a controller raises is a fault of the
double: it is kept in `failures`, and the cluster raises it when it is closed.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable

from tests.support.kube.api import Api, ApiError
from tests.support.kube.controllers.mirror import Key, Mirror, Object
from tests.support.kube.controllers.timing import Timing
from tests.support.kube.resources import Resource

FIRST_BACK_OFF_S = 1.0
MAX_BACK_OFF_S = 60.0
"""Both scaled."""


class Controller(ABC):
    """One kind's controller. `reconcile` is synchronous, so nothing changes between its reads and its writes."""

    def __init__(self, api: Api, mirror: Mirror, timing: Timing) -> None:
        self.api = api
        self.mirror = mirror
        self.timing = timing

    @abstractmethod
    def keys(self, kind: str, resource: Resource, thing: Object) -> Iterable[Key]:
        """Which keys a change (`kind`: ADDED, MODIFIED, DELETED) of `thing` touches."""

    @abstractmethod
    def reconcile(self, key: Key) -> float | None:
        """Bring the key a step nearer. Returns after how many (unscaled) seconds to look again. May raise ApiError."""


class ControllerLoop:
    """Runs controllers over one mirror. Owned by the cluster, which awaits `run()` in a task and cancels it."""

    def __init__(self, mirror: Mirror, timing: Timing, controllers: Iterable[Controller]) -> None:
        self.failures: list[Exception] = []
        self._controllers = tuple(controllers)
        self._timing = timing
        self._due: dict[tuple[int, Key], float] = {}
        self._mirror = mirror
        self._heap: list[tuple[float, int, tuple[int, Key]]] = []
        self._tries: dict[tuple[int, Key], int] = defaultdict(int)
        self._order = itertools.count()
        self._wake = asyncio.Event()
        mirror.on_change(self._changed)

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        for resource, thing in self._mirror.everything():
            self._changed("ADDED", resource, thing)
        while True:
            self._wake.clear()
            while self._heap and self._heap[0][0] <= loop.time():
                at, _, item = heapq.heappop(self._heap)
                if self._due.get(item) == at:
                    del self._due[item]
                    self._reconcile(item)
                    await asyncio.sleep(0)
            wait_s = self._heap[0][0] - loop.time() if self._heap else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _reconcile(self, item: tuple[int, Key]) -> None:
        index, key = item
        try:
            again_s = self._controllers[index].reconcile(key)
        except ApiError:
            again_s = min(FIRST_BACK_OFF_S * 2.0 ** self._tries[item], MAX_BACK_OFF_S)
            self._tries[item] += 1
        except Exception as error:  # noqa: BLE001 - kept for the test that owns the cluster
            self.failures.append(error)
            return
        else:
            self._tries.pop(item, None)
        if again_s is not None:
            self._put(item, self._timing.seconds(again_s))

    def _changed(self, kind: str, resource: Resource, thing: Object) -> None:
        for index, controller in enumerate(self._controllers):
            for key in controller.keys(kind, resource, thing):
                self._put((index, key), self._timing.reaction_s)

    def _put(self, item: tuple[int, Key], after_s: float) -> None:
        at = asyncio.get_running_loop().time() + after_s
        if at < self._due.get(item, float("inf")):
            self._due[item] = at
            heapq.heappush(self._heap, (at, next(self._order), item))
            self._wake.set()
