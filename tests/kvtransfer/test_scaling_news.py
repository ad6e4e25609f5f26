"""What gateways tell for scaling, in a real Valkey: who wrote it, how long it stays, and what an outage costs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

import pytest
from antiphon_kvtransfer.keys import ModelKeys
from antiphon_kvtransfer.scaling_news import FORGOTTEN_MS, NEWS_TTL_MS, NewsWriter, read_news
from antiphon_policy.scaling.news import GatewayNews, encode_news
from redis.asyncio import Redis

from tests.support.valkey import Valkey

KEY = "chat/qwen"
NOW_MS = 1_764_520_499_123.5


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    with Valkey() as running:
        yield running


@contextlib.asynccontextmanager
async def writing(server: Valkey, gateway_id: str) -> AsyncIterator[NewsWriter]:
    writer = NewsWriter(server.url, gateway_id)
    try:
        yield writer
    finally:
        await writer.close()


@contextlib.asynccontextmanager
async def reading(server: Valkey) -> AsyncIterator[Redis]:
    async with Redis.from_url(server.url, protocol=2) as redis:
        yield redis


def news(gateway_id: str, at_ms: float = NOW_MS) -> bytes:
    return encode_news(GatewayNews(gateway_id, KEY, at_ms))


async def test_each_gateway_has_a_field_and_takes_it_away_when_it_ends(server: Valkey) -> None:
    async with reading(server) as redis, writing(server, "one") as one, writing(server, "two") as two:
        assert await read_news(redis, KEY) == {}
        assert await one.write(KEY, b"early", NOW_MS)
        assert await two.write(KEY, news("two"), NOW_MS)
        assert await one.write(KEY, news("one"), NOW_MS)
        assert await read_news(redis, KEY) == {"one": news("one"), "two": news("two")}
        assert 0 < await redis.pttl(ModelKeys(KEY).news) <= NEWS_TTL_MS
        assert await one.remove(KEY)
        assert await read_news(redis, KEY) == {"two": news("two")}
        assert await two.remove(KEY)
        assert await redis.exists(ModelKeys(KEY).news) == 0


async def test_what_a_killed_gateway_left_is_removed_by_another_and_nobody_elses(server: Valkey) -> None:
    async with reading(server) as redis, writing(server, "one") as one:
        left = {
            "killed": news("killed", NOW_MS - FORGOTTEN_MS - 1),
            "slow": news("slow", NOW_MS - FORGOTTEN_MS + 1000),
            "ahead": news("ahead", NOW_MS + 5000),
            "unreadable": b"nonsense",
        }
        await redis.hset(ModelKeys(KEY).news, mapping=left)  # type: ignore[arg-type,misc]
        assert await one.write(KEY, news("one"), NOW_MS)
        assert set(await read_news(redis, KEY)) == {"one", "slow", "ahead"}
        # Not with every write: values of all gateways would be read each time.
        await redis.hset(ModelKeys(KEY).news, "killed", left["killed"])  # type: ignore[misc]
        assert await one.write(KEY, news("one"), NOW_MS)
        assert "killed" in await read_news(redis, KEY)
        await redis.delete(ModelKeys(KEY).news)


async def test_a_redis_that_is_away_is_said_once_and_written_to_again_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Valkey() as server:
        async with writing(server, "one") as one:
            assert await one.write(KEY, news("one"), NOW_MS)
            server.kill()
            with caplog.at_level(logging.WARNING):
                assert not await one.write(KEY, news("one"), NOW_MS)
                assert not await one.write(KEY, news("one"), NOW_MS)
                assert not await one.remove(KEY)
            assert len([line for line in caplog.messages if "not told" in line]) == 1
            server.start()
            assert await one.write(KEY, news("one"), NOW_MS)
            async with reading(server) as redis:
                assert await read_news(redis, KEY) == {"one": news("one")}
