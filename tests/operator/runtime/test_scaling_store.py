"""The autoscaler's shelf, in a real Valkey with the users that the chart gives it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from antiphon_kvtransfer import RedisAccess
from antiphon_kvtransfer.keys import ModelKeys
from antiphon_kvtransfer.scaling_decisions import read_decisions
from antiphon_operator.runtime.scaling_store import ScalingStore, StoreError
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import (
    GatewayNews,
    ModelSetup,
    PoolSetup,
    Promise,
    ScalingMemory,
    TtftTarget,
    decide,
    encode_news,
    merged,
)
from antiphon_policy.scaling.history import History
from antiphon_policy.scaling.remembered import MOST_DECISIONS, Remembered, decode_decision
from redis import Redis

from tests.support import chart
from tests.support.valkey import Valkey

KEY = "chat/qwen"
KEYS = ModelKeys(KEY)
NOW = 1_700_000_000_000.0
NEWS = GatewayNews("g", KEY, NOW)
SETUP = ModelSetup(Promise(TtftTarget(500.0)), (PoolSetup(WorkerRole.BOTH, 1, 1),))
DECISION = decide(merged([NEWS], SETUP, History(), ScalingMemory(), NOW))


class Scene:
    def __init__(self, valkey: Valkey, access: RedisAccess, gateway_password: str) -> None:
        self.valkey, self.access = valkey, access
        self.leads = True
        self.store = ScalingStore(access, may_write=lambda: self.leads)
        self.gateway = Redis.from_url(valkey.url, username="antiphon-gateway", password=gateway_password, protocol=2)

    async def decisions(self) -> int:
        return len(await read_decisions(self.access, KEY))


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    secret = chart.find(chart.render(), "Secret", "antiphon-redis")["stringData"]
    password = tmp_path / "password"
    password.write_text(secret["operator-password"])
    with Valkey(users=secret["users.acl"]) as valkey:
        access = RedisAccess(valkey.url, "antiphon-operator", str(password))
        scene = Scene(valkey, access, secret["gateway-password"])
        yield scene
        await scene.store.close()
        scene.gateway.close()


async def test_news_memory_and_decisions_are_read_and_kept(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    store, gateway = scene.store, scene.gateway
    assert await store.read(KEY, with_memory=True) == await store.read(KEY, with_memory=False)
    gateway.hset(KEYS.news, "g", encode_news(NEWS))
    gateway.hset(KEYS.news, "strange", b"{}")
    for _ in range(2):
        shelf = await store.read(KEY, with_memory=True)
        assert shelf.news == (NEWS,)
        assert shelf.remembered is None
    assert sum("strange" in line for line in caplog.messages) == 1
    await store.keep(KEY, Remembered(owner="u1"), None)
    assert await scene.decisions() == 0
    for _ in range(MOST_DECISIONS + 3):
        await store.keep(KEY, Remembered(owner="u2"), DECISION)
    assert (await store.read(KEY, with_memory=True)).remembered == Remembered(owner="u2")
    assert (await store.read(KEY, with_memory=False)).remembered is None
    written = await read_decisions(scene.access, KEY)
    assert len(written) == MOST_DECISIONS
    assert decode_decision(written[-1]) == DECISION


async def test_an_outage_is_an_error_each_time_and_then_all_goes_on(scene: Scene) -> None:
    await scene.store.keep(KEY, Remembered(), DECISION)
    scene.valkey.kill()
    with pytest.raises(StoreError, match="the news of chat/qwen"):
        await scene.store.read(KEY, with_memory=True)
    with pytest.raises(StoreError) as told:
        await scene.store.keep(KEY, Remembered(), None)
    assert scene.gateway.connection_pool.connection_kwargs["password"] not in str(told.value)
    scene.valkey.start()
    assert (await scene.store.read(KEY, with_memory=True)).news == ()
    await scene.store.keep(KEY, Remembered(), DECISION)
    assert await scene.decisions() == 1


async def test_who_does_not_hold_the_lease_any_more_writes_nothing(scene: Scene) -> None:
    scene.leads = False
    with pytest.raises(StoreError, match="Lease"):
        await scene.store.keep(KEY, Remembered(), DECISION)
    assert await scene.decisions() == 0
