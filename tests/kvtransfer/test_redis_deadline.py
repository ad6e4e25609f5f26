"""A deadline measures Redis, not the process that waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from antiphon_kvtransfer._redis import Backoff, RedisSession, fleet_deadline_s, session
from antiphon_kvtransfer.access import RedisAccess

from tests.support.valkey import Valkey

DEADLINE_S = 0.2
ECHO = "return ARGV[1]"


@pytest.fixture
def server() -> Iterator[Valkey]:
    with Valkey() as running:
        yield running


async def echo(redis: RedisSession) -> bytes:
    answer: bytes = await redis.script(ECHO, (), ("hello",), DEADLINE_S)
    return answer


async def test_an_answer_that_this_process_was_too_busy_to_read_counts(server: Valkey) -> None:
    """Each round of the loop takes longer than the deadline, and it takes some rounds to read what lies there."""
    busy = True

    async def keep_busy() -> None:
        while busy:
            time.sleep(1.5 * DEADLINE_S)  # noqa: ASYNC251 - what is shown is what a blocked loop does
            await asyncio.sleep(0)

    async with session(RedisAccess(server.url), Backoff()) as redis:
        await echo(redis)
        working = asyncio.create_task(keep_busy())
        try:
            page = await redis.script("return string.rep('x', 300000)", (), (), DEADLINE_S)
        finally:
            busy = False
            await working
        assert len(page) == 300_000


async def test_a_redis_that_does_not_answer_is_given_up(server: Valkey) -> None:
    backoff = Backoff()
    server.freeze()
    try:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
            async with session(RedisAccess(server.url), backoff) as redis:
                await echo(redis)
        with pytest.raises(TimeoutError, match=r"no answer within 0\.4 s"):
            async with session(RedisAccess(server.url), backoff) as redis:
                await echo(redis)
    finally:
        server.thaw()
    async with session(RedisAccess(server.url), backoff) as redis:
        assert await echo(redis) == b"hello"


def test_patience_is_bounded_and_goes_back() -> None:
    backoff = Backoff()
    for _ in range(10):
        backoff.timed_out()
    assert backoff.patience == 4
    for _ in range(10):
        backoff.succeeded()
    assert backoff.patience == 1


def test_the_deadline_of_a_fleet() -> None:
    assert fleet_deadline_s(0) == 1.0
    assert fleet_deadline_s(1000) == 3.0
