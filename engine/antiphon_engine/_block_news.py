"""Changes of the index on their way to the listener, in order, and told without the engine's lock.

Several threads change the index, and each tells what came of its change. Their order is kept because one thread at a
time delivers: whoever finds another one delivering leaves its changes to it, and waits for nothing.
"""

from __future__ import annotations

import threading
from collections import deque

from antiphon_engine.interface import BlocksChanged, EngineListener


class BlockNews:
    def __init__(self) -> None:
        self._lined_up: deque[BlocksChanged] = deque()
        self._delivering = threading.Lock()

    def add(self, change: BlocksChanged) -> None:
        """Under the engine's lock, so that the order is that of the changes."""
        self._lined_up.append(change)

    def deliver(self, listener: EngineListener) -> None:
        """Without the engine's lock: the listener may call the engine."""
        while self._lined_up and self._delivering.acquire(blocking=False):
            try:
                while self._lined_up:
                    listener.on_blocks(self._lined_up.popleft())
            finally:
                self._delivering.release()
