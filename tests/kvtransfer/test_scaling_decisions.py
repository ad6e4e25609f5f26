"""Decisions and memory of whoever scales, in a real Valkey: kept in order, bounded, gone by themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from antiphon_kvtransfer import RedisAccess
from antiphon_kvtransfer.keys import ModelKeys
from antiphon_kvtransfer.scaling_decisions import (
    DECISIONS_KEPT,
    DecisionsUnavailable,
    read_decisions,
    read_memory,
    write_decision,
)
from redis import Redis

from tests.support.valkey import Valkey

MODEL = "space/a model"


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with Valkey(unix=True) as running:
        yield running


async def test_decisions_come_back_in_order_and_the_last_memory_counts(valkey: Valkey) -> None:
    access = RedisAccess(valkey.url)
    assert await read_memory(access, MODEL) is None
    assert await read_decisions(access, MODEL) == []
    for number in range(45):
        await write_decision(access, MODEL, b"memory %d" % number, b'{"number": %d}' % number)
    await write_decision(access, MODEL, b"renewed")
    assert await read_memory(access, MODEL) == b"renewed"
    assert await read_decisions(access, MODEL) == [b'{"number": %d}' % number for number in range(45)]
    assert await read_decisions(access, "another") == []


async def test_only_the_newest_are_kept_and_all_has_an_end(valkey: Valkey) -> None:
    access, keys = RedisAccess(valkey.url), ModelKeys("busy")
    redis = Redis.from_url(valkey.url)
    redis.xadd(keys.decisions, {"of another version": "1"})
    for _ in range(DECISIONS_KEPT):
        redis.xadd(keys.decisions, {"decision": "old"})
    await write_decision(access, "busy", b"m", b"new")
    kept = await read_decisions(access, "busy")
    assert len(kept) == DECISIONS_KEPT
    assert kept[-1] == b"new"
    assert 0 < redis.ttl(keys.scaling) == redis.ttl(keys.decisions)


async def test_a_redis_that_is_away_is_told_without_its_password() -> None:
    access = RedisAccess("redis://someone:open-sesame@127.0.0.1:1")
    for call in (write_decision(access, "m", b""), read_decisions(access, "m"), read_memory(access, "m")):
        with pytest.raises(DecisionsUnavailable) as away:
            await call  # type: ignore[misc]
        assert "open-sesame" not in str(away.value)
