"""Wait in a test for something that another task or process brings about. Bounded; says nothing about speed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WAIT_S = 60.0


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event of its own
            await asyncio.sleep(0.01)


def eventually_now(condition: Callable[[], bool]) -> None:
    """As `eventually`, for tests without a loop."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.01)
