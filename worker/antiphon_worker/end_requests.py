"""SIGTERM and SIGINT of a worker process, heard from the moment there is an event loop, by whoever can act on them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


class EndRequests:
    """Made on the event loop. One listener at a time; a new one is told what came before."""

    def __init__(self) -> None:
        self._count = 0
        self._listener: Callable[[], None] = lambda: None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._heard)

    @property
    def any(self) -> bool:
        return self._count > 0

    def heard_by(self, listener: Callable[[], None]) -> None:
        self._listener = listener
        for _ in range(self._count):
            listener()

    def _heard(self) -> None:
        self._count += 1
        self._listener()
