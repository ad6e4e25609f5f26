"""Requests that came before any worker of their model: the Model is asleep or starting, and says so.

Without a worker there is no card, so they cannot even be tokenised: they wait here, in their handlers, until something
changes for their model, and look again. Whoever wakes the Model is told of each that comes (`on_held`). Bounds and
deadlines are the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator


class Lobby:
    """Futures by model, each with about how many prompt tokens its request has. Plain calls on one event loop."""

    def __init__(self) -> None:
        self.on_held: Callable[[str], None] = lambda model: None
        """Called when a request has come in, with its model."""
        self._waiting: dict[str, dict[asyncio.Future[None], int]] = {}

    def __len__(self) -> int:
        return sum(len(futures) for futures in self._waiting.values())

    def __iter__(self) -> Iterator[str]:
        """Models that are waited for."""
        return iter(list(self._waiting))

    @property
    def tokens(self) -> int:
        """Of all that wait, about."""
        return sum(sum(futures.values()) for futures in self._waiting.values())

    def waiting_for(self, model: str) -> tuple[int, int]:
        """(requests, their prompt tokens about) that wait for the model."""
        futures = self._waiting.get(model, {})
        return len(futures), sum(futures.values())

    @contextlib.contextmanager
    def place(self, model: str, tokens: int) -> Iterator[asyncio.Future[None]]:
        """A future that is done when something has changed for the model. `tokens`: of the request's prompt, about."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        futures = self._waiting.setdefault(model, {})
        futures[future] = tokens
        self.on_held(model)
        try:
            yield future
        finally:
            futures.pop(future, None)
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
