"""The wait for room: it ends by success or by its deadline, whatever else happens in the pool meanwhile."""

from __future__ import annotations

import asyncio

from antiphon_worker.bridge import EngineBridge

from tests.support.workers import within


def bridge() -> EngineBridge:
    return EngineBridge(on_blocks=lambda _: None, on_failure=lambda _: None)


async def test_room_that_goes_to_others_each_time_does_not_prolong_the_wait() -> None:
    waiting = bridge()
    tries = 0

    def always_too_late() -> bool:
        nonlocal tries
        tries += 1
        # Blocks of others come and go all the time.
        asyncio.get_running_loop().call_later(0.01, waiting.on_capacity)
        return False

    assert not await within(10, waiting.room(always_too_late, 0.2))
    assert tries > 2


async def test_room_is_taken_when_it_comes() -> None:
    waiting = bridge()
    answers = [True, False, False]

    def third_time() -> bool:
        asyncio.get_running_loop().call_soon(waiting.on_capacity)
        return answers.pop()

    assert await within(10, waiting.room(third_time, 10))
    assert answers == []


async def test_no_room_at_all() -> None:
    assert not await within(10, bridge().room(lambda: False, 0.01))
