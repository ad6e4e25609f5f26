"""From the engine's thread to the event loop, at the cost of one wake-up a step.

The engine calls its listener on its own thread; everything else of a worker lives on one event loop. `EngineBridge`
carries each step's result over in one `call_soon_threadsafe` and hands every request's part to whoever subscribed.
Subscribers are plain functions that run on the loop and must not block. Block changes do not touch the loop at all:
the announcer takes them on any thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from antiphon_engine.interface import (
    BlocksChanged,
    EngineListener,
    PrefillProgress,
    RequestOutput,
    StepResult,
)

log = logging.getLogger("antiphon.worker")


class EngineBridge(EngineListener):
    """The one listener of a worker's engine. Made on the event loop that it delivers to."""

    def __init__(
        self, *, on_blocks: Callable[[BlocksChanged], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_blocks = on_blocks
        self._on_failure = on_failure
        self._outputs: dict[str, Callable[[RequestOutput], None]] = {}
        self._prefills: dict[str, Callable[[PrefillProgress], None]] = {}
        self._observers: list[Callable[[StepResult], None]] = []
        self._capacity_waiters: set[asyncio.Future[None]] = set()
        self._capacity_lock = threading.Lock()
        self._capacity_pending = False
        self._closed = False

    # -- on the event loop

    def subscribe_outputs(self, request_id: str, callback: Callable[[RequestOutput], None]) -> None:
        """Have `callback` called with what each step brings for a GENERATE request, until `unsubscribe`."""
        self._outputs[request_id] = callback

    def subscribe_prefill(self, request_id: str, callback: Callable[[PrefillProgress], None]) -> None:
        """The same for a PREFILL request."""
        self._prefills[request_id] = callback

    def unsubscribe(self, request_id: str) -> None:
        self._outputs.pop(request_id, None)
        self._prefills.pop(request_id, None)

    def observe(self, callback: Callable[[StepResult], None]) -> None:
        """Have `callback` called with every step, before the requests' subscribers."""
        self._observers.append(callback)

    async def capacity(self, deadline_s: float) -> bool:
        """Wait until blocks became free; False when none did in time.

        A `reserve` that found no room and this wait, with no `await` in between, cannot miss each other.
        """
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._capacity_waiters.add(waiter)
        try:
            async with asyncio.timeout(deadline_s):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._capacity_waiters.discard(waiter)
        return True

    async def room(self, reserve: Callable[[], bool], deadline_s: float) -> bool:
        """Call `reserve` now and whenever blocks became free, until it succeeds. False when it did not in time.

        The deadline is for all of it: blocks that come free and go to others do not prolong it.
        """
        ends_at = self._loop.time() + deadline_s
        while not reserve():
            left_s = ends_at - self._loop.time()
            if left_s <= 0 or not await self.capacity(left_s):
                return False
        return True

    def close(self) -> None:
        """Deliver nothing any more."""
        self._closed = True

    # -- on the engine's thread, or any

    def on_step(self, result: StepResult) -> None:
        self._loop.call_soon_threadsafe(self._deliver_step, result)

    def on_blocks(self, change: BlocksChanged) -> None:
        self._on_blocks(change)

    def on_capacity(self) -> None:
        with self._capacity_lock:
            if self._capacity_pending:
                return
            self._capacity_pending = True
        self._loop.call_soon_threadsafe(self._deliver_capacity)

    def on_failure(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._deliver_failure, error)

    # -- deliveries, on the loop

    def _deliver_step(self, result: StepResult) -> None:
        if self._closed:
            return
        for observer in self._observers:
            observer(result)
        for output in result.outputs:
            on_output = self._outputs.get(output.request_id)
            if on_output is not None:
                on_output(output)
        for progress in result.prefills:
            on_progress = self._prefills.get(progress.request_id)
            if on_progress is not None:
                on_progress(progress)

    def _deliver_capacity(self) -> None:
        with self._capacity_lock:
            self._capacity_pending = False
        for waiter in self._capacity_waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _deliver_failure(self, error: BaseException) -> None:
        if not self._closed:
            self._on_failure(error)
