"""Everything that can happen to the block index, under load: no request fails, and soon both gateways are right again.

Real processes: Valkey (and a replica), one worker that prefills, two that decode, one that does both, two gateways;
workers with the timed engine, which checks the content of every block that it uses. Their options are the defaults,
so the 5 s below are the product's own promise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from antiphon_kvtransfer.keys import ModelKeys

from tests.support.index_house import Conversations, IndexHouse
from tests.support.lagging_replica import LaggingReplica, replica_of
from tests.support.stream_edits import EDITS, edit_unread_events
from tests.support.workers import TIMED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STALENESS_S = 5.0
SETTLED_S = 2.5
"""Every worker has sent a heartbeat after the fault and every gateway has looked: what the fault did is seen, not only
what was known before."""
ROLES = {"p0": "prefill", "d0": "decode", "d1": "decode", "b0": "both"}
OPTIONS = (*TIMED, "--timed-base-ms", "3", "--kv-blocks", "96", "--block-tokens", "16")
"""Small pools: blocks are evicted all the time, so sets shrink as well as grow."""


def client_of(house: IndexHouse) -> Any:
    return redis.Redis.from_url(house.valkey.url, protocol=2)


async def edit_the_stream(house: IndexHouse, talk: Conversations) -> None:
    """Dropped, duplicated, reordered, trimmed: one after the other."""
    with client_of(house) as client:
        for edit in EDITS.values():
            await edit_unread_events(house.to_gateways, client, ModelKeys(house.model).events, edit)
            await talk.until_answered(3)


async def restart_a_gateway(house: IndexHouse, talk: Conversations) -> None:
    gateway = house.gateways[1]
    await gateway.stop()
    await talk.until_answered(5)
    await gateway.start(decode_workers=3)


async def restart_a_worker_in_place(house: IndexHouse, talk: Conversations) -> None:
    """kill -9, and the same id again with an empty pool. What it was answering goes on elsewhere."""
    await house.workers["d1"].kill()
    await house.start_worker("d1", "decode")


async def restart_valkey_empty(house: IndexHouse, talk: Conversations) -> None:
    house.valkey.kill()
    await talk.until_answered(10)
    house.valkey.start()


async def fail_over_to_a_lagging_replica(house: IndexHouse, talk: Conversations) -> None:
    replica: LaggingReplica = await house.keep(replica_of(house.valkey))
    replica.lag()
    await talk.until_answered(15)
    house.valkey.kill()
    replica.promote()
    house.move_to(replica.server)


Fault = Callable[[IndexHouse, Conversations], Awaitable[None]]
FAULTS: tuple[Fault, ...] = (
    edit_the_stream,
    restart_a_gateway,
    restart_a_worker_in_place,
    restart_valkey_empty,
    fail_over_to_a_lagging_replica,
)


async def test_no_request_fails_and_the_gateways_are_right_again(tmp_path: Path) -> None:
    """llm-d/llm-d-router#1737, llm-d/llm-d-router#2853, ai-dynamo/dynamo#4904, vllm-project/aibrix#917."""
    async with IndexHouse(tmp_path, *OPTIONS) as house:
        await house.start(ROLES, gateways=2)
        async with Conversations(house, lanes=4).going_on() as talk:
            await talk.until_answered(10)
            await house.until_indexes_are_true(from_s=0, deadline_s=STALENESS_S)
            for fault in FAULTS:
                loads = await house.sets_loaded()
                await fault(house, talk)
                await house.until_indexes_are_true(from_s=SETTLED_S, deadline_s=STALENESS_S)
                assert talk.failures == [], fault.__name__
                assert await house.sets_loaded() != loads, f"{fault.__name__}: no gateway noticed anything"
        assert talk.failures == []
        pages = [await gateway.get("/v1/antiphon/index") for gateway in house.gateways]
        assert all(page["redis"] == "ok" and page["workers"].keys() == ROLES.keys() for page in pages)
        assert all(page["blocks"] > 0 for page in pages)
