"""Requests that came before any worker of their model: the Model is asleep or starting, and says so.

Without a worker there is no card, so they cannot even be tokenised: they wait here, in their handlers, until something
changes for their model, and look again. Bounds and deadlines are the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Lobby:
    """Futures by model. Plain calls on one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return sum(len(futures) for futures in self._waiting.values())

    @contextlib.contextmanager
    def place(self, model: str) -> Iterator[asyncio.Future[None]]:
        """A future that is done when something has changed for the model."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        futures = self._waiting.setdefault(model, set())
        futures.add(future)
        try:
            yield future
        finally:
            futures.discard(future)
            if not futures and self._waiting.get(model) is futures:
                del self._waiting[model]

    def call(self, model: str) -> None:
        """Something changed for the model."""
        for future in self._waiting.get(model, ()):
            if not future.done():
                future.set_result(None)

    def call_all(self) -> None:
        for model in self._waiting:
            self.call(model)
