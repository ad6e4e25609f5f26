"""The operator's autoscaler: the real process, the API double, a real Valkey, and news as gateways would write them.

Sizes are levels, so the questions are: does the Pool get what the law says, does nothing happen that it does not say,
and does a killed operator or Valkey leave anything half done or done twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio
from antiphon_kvtransfer import RedisAccess
from antiphon_kvtransfer.keys import ModelKeys
from antiphon_kvtransfer.scaling_decisions import read_decisions
from antiphon_operator import names
from antiphon_policy.latency import StepModel
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling import (
    GatewayNews,
    RequestSample,
    ScalingMemory,
    WorkerNews,
    decide,
    encode_news,
)
from antiphon_policy.scaling.records import PoolMemory
from antiphon_policy.scaling.remembered import (
    PoolPast,
    Remembered,
    decode_decision,
    decode_remembered,
    encode_remembered,
)

from tests.cluster.history import MODELS, World
from tests.cluster.stage import Stage, a_namespace, another_operator
from tests.cluster.support import Desk, Object
from tests.support.kube.operator_process import OperatorProcess
from tests.support.valkey import Valkey

SLA = {"ttft": {"p95": "1500ms"}, "tpot": {"p95": "50ms"}}
ENFORCE = {"mode": "Enforce", "prefill": {"min": 1, "max": 4}, "decode": {"min": 1, "max": 4}}
STEP = StepModel(base_ms=5.0, per_new_token_ms=0.5)
ROLES = {"prefill": WorkerRole.PREFILL, "decode": WorkerRole.DECODE}
BUSY, CALM = 1500, 1
"""Requests in five minutes, of a second of prefill each."""


def now_ms() -> float:
    return time.time() * 1000.0


class Gateways:
    """What a gateway would write of one Model, four times a second, until told otherwise."""

    def __init__(self, valkey: Valkey, desk: Desk) -> None:
        self.valkey, self.desk = valkey, desk
        self.client = redis.asyncio.Redis.from_url(valkey.url)
        self.requests = CALM
        self.held = 0

    def keys(self, model: str = "qwen") -> ModelKeys:
        return ModelKeys(names.model_key(self.desk.namespace, model))

    def news(self) -> GatewayNews:
        now, count = now_ms(), self.requests
        spacing_ms = 300_000.0 / (count + 1)
        samples = [
            RequestSample(now - spacing_ms * at + 0.9 * spacing_ms, 2000, 2000, 50, 1.0, 900.0, 9.0)
            for at in range(count, 0, -1)
        ]
        return GatewayNews(
            "g",
            self.keys().model,
            now,
            samples=tuple(samples),
            workers=tuple(
                WorkerNews(f"a-{role}-worker", does, said_ms=now, step=STEP, max_sequences=64)
                for role, does in ROLES.items()
            ),
            held_requests=self.held,
            held_tokens=50 * self.held,
        )

    async def tell(self) -> None:
        while True:
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                await self.client.hset(self.keys().news, "g", encode_news(self.news()))
            await asyncio.sleep(0.25)

    async def past(self, uid: str, *, idle: bool = False) -> None:
        """An operator has looked at the Model for hours: workers start in a second and drain in two."""
        now, before = now_ms(), now_ms() - 7_200_000.0
        remembered = Remembered(
            owner=uid,
            memory=ScalingMemory(
                tuple(PoolMemory(does, since_ms=before, edits=0) for does in ROLES.values()), before if idle else now
            ),
            pools=tuple(PoolPast(does, (1000.0,), (2000.0,)) for does in ROLES.values()),
        )
        await self.client.set(self.keys().scaling, encode_remembered(remembered))

    async def remembered(self) -> Remembered:
        """Nothing, where Redis is away or has nothing."""
        try:
            raw = await self.client.get(self.keys().scaling)
        except redis.exceptions.RedisError:
            return Remembered()
        return decode_remembered(raw) if isinstance(raw, bytes) else Remembered()


@dataclass(frozen=True)
class House:
    """One operator with Redis for all tests of this module: each start of one takes seconds."""

    valkey: Valkey
    operator: OperatorProcess


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def house(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    folder = tmp_path_factory.mktemp("autoscaler")
    with Valkey() as valkey:
        async with another_operator(stage, folder, name="autoscaler", redis_url=valkey.url, revived=True) as operator:
            yield House(valkey, operator)


@pytest_asyncio.fixture(loop_scope="session")
async def desk(stage: Stage, house: House, request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    desk = Desk(stage.cluster, house.operator, stage.history, await a_namespace(stage.cluster, request.node.name))
    yield desk
    for model in await desk.all(MODELS):
        await desk.delete(model["metadata"]["name"])


@pytest_asyncio.fixture(loop_scope="session")
async def gateways(house: House, desk: Desk) -> AsyncIterator[Gateways]:
    gateways = Gateways(house.valkey, desk)
    telling = asyncio.create_task(gateways.tell())
    yield gateways
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    await gateways.client.aclose()


async def begin(desk: Desk, gateways: Gateways, autoscaling: Object, *, idle: bool = False, **spec: Any) -> None:
    """A Model that serves, with a past, and then its mode."""
    model = await desk.create("qwen", prefill={}, decode={}, sla=SLA, **spec)
    await desk.until_serving("qwen", prefill=1, decode=1)
    await gateways.past(model["metadata"]["uid"], idle=idle)
    await desk.edit("qwen", autoscaling=autoscaling)


async def wanted(desk: Desk, role: str) -> int:
    return int((await desk.pool(f"qwen-{role}"))["spec"]["replicas"])


async def until_wanted(desk: Desk, role: str, low: int, high: int) -> int:
    return await desk.eventually(
        lambda: wanted(desk, role),
        lambda count: low <= count <= high,
        what=f"{low} to {high} {role} replicas are wanted",
    )


async def test_enforce_grows_with_the_load_says_why_and_shrinks_after_it(desk: Desk, gateways: Gateways) -> None:
    await begin(desk, gateways, ENFORCE)
    gateways.requests = BUSY
    await until_wanted(desk, "prefill", 4, 4)
    limited = await desk.until("qwen", "ScalingLimited", "True", "Ceiling", says="spec.autoscaling.prefill.max")
    told = limited["status"]["autoscaler"]
    assert told["lastDecision"]["action"] == "add"
    assert "prefill 1 -> 4" in told["lastDecision"]["sentence"]
    assert told["recommendation"]["prefill"] == 4
    assert limited["status"]["sla"]["ttft"]["summary"] == "900ms/1500ms"
    assert "prefill 1 -> 4" in (await desk.until_event("qwen", "ScaledUp"))["message"]
    await desk.until_replicas("qwen", "prefill", 4)
    gateways.requests = CALM
    await until_wanted(desk, "prefill", 1, 2)
    await desk.until_event("qwen", "ScaledDown")
    written = [
        decode_decision(raw) for raw in await read_decisions(RedisAccess(gateways.valkey.url), gateways.keys().model)
    ]
    assert {"add", "remove"} <= {decision.action.value for decision in written}
    for decision in written:
        assert decision.inputs is not None
        assert decide(decision.inputs) == decision
    # A hand's number stands, and is counted.
    await desk.scale("qwen-decode", 3)
    await desk.until_serving("qwen", decode=3)
    await desk.eventually(
        gateways.remembered,
        lambda kept: kept.memory.of(WorkerRole.DECODE).edits == 1,
        what="the law knows of the hand's edit",
    )
    assert await wanted(desk, "decode") == 3


@pytest.mark.exhaustive  # e2e/test_autoscaling.py has it with whole workers
async def test_killed_in_mid_action_it_goes_on_and_nothing_is_done_twice(desk: Desk, gateways: Gateways) -> None:
    await begin(desk, gateways, ENFORCE)
    before = await gateways.remembered()
    since = await desk.version()
    gateways.requests = BUSY
    await desk.eventually(
        gateways.remembered, lambda kept: kept.told is not None and kept.told.action.value == "add", what="it decided"
    )
    desk.operator.kill()
    await desk.operator.restart()
    await desk.operator.until_acting()
    await until_wanted(desk, "prefill", 4, 4)
    await desk.eventually(
        lambda: desk.operator.metric("antiphon_operator_scaling_decisions_total"), what="the next one has decided too"
    )
    gateways.valkey.kill()
    await desk.until_replicas("qwen", "prefill", 4)
    gateways.valkey.start()
    kept = await desk.eventually(gateways.remembered, lambda kept: kept.owner, what="its memory is back")
    assert kept.memory.of(WorkerRole.PREFILL).since_ms == before.memory.of(WorkerRole.PREFILL).since_ms
    assert kept.of(WorkerRole.DECODE).starts_ms[0] == 1000.0
    assert await wanted(desk, "prefill") == 4

    def too_many(world: World) -> str:
        found = world.replicas("qwen", "prefill")
        return f"{len(found)} prefill replicas" if len(found) > 4 else ""

    await desk.always(too_many, since)


async def test_advise_and_external_change_nothing(desk: Desk, gateways: Gateways) -> None:
    await begin(desk, gateways, {**ENFORCE, "mode": "Advise"})
    gateways.requests = BUSY
    event = await desk.until_event("qwen", "ScalingAdvised")
    assert "prefill 1 -> 4" in event["message"]
    advised = await desk.until("qwen", "ScalingLimited", "True")
    assert advised["status"]["autoscaler"]["recommendation"]["prefill"] == 4
    assert (await wanted(desk, "prefill"), await wanted(desk, "decode")) == (1, 1)
    await desk.edit("qwen", autoscaling={"mode": "External"})
    await desk.scale("qwen-decode", 2)
    told = await desk.until_serving("qwen", prefill=1, decode=2)
    assert "autoscaler" not in told["status"]


async def test_a_pool_that_nobody_asks_sleeps_and_a_held_request_wakes_it(desk: Desk, gateways: Gateways) -> None:
    gateways.requests = 0
    asleep = {"mode": "Enforce", "prefill": {"min": 0, "max": 4}, "decode": {"min": 0, "max": 4}}
    await begin(desk, gateways, asleep, idle=True)
    model = await desk.until("qwen", "Ready", "False", "ScaledToZero", says="wakes")
    assert model["status"]["phase"] == "Sleeping"
    gateways.held = 1
    await desk.until_serving("qwen", prefill=1, decode=1)
    assert (await desk.until_event("qwen", "Woken"))["type"] == "Normal"
