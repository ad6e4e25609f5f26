"""Of two operators one acts; when it goes, in whatever way, the other takes over, and at no time do both write."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from antiphon_telemetry.exit import ExitCode

from tests.cluster.faults import Victim, a_victim_of, seconds_since, the_shared_one_ends
from tests.cluster.history import MODELS
from tests.cluster.stage import Stage, a_namespace
from tests.cluster.support import Desk
from tests.support.kube.operator_process import LEASE_NAMESPACE
from tests.support.kube.resources import LEASES

log = logging.getLogger(__name__)
FAILOVER_S = 90.0
"""Much longer than any of it takes on a machine that is not busy: the log has how long it took."""


@dataclass(frozen=True, slots=True)
class Rivals:
    """Two operators of one namespace and one Lease, the first one acting, each behind a proxy of its own."""

    first: Victim
    second: Victim

    @property
    def desk(self) -> Desk:
        return self.second.desk

    async def holder(self) -> str:
        lease = await self.desk.cluster.get(LEASES, LEASE_NAMESPACE, self.desk.namespace)
        return "" if lease is None else str(lease["spec"].get("holderIdentity") or "")

    async def second_acts(self, began_s: float) -> float:
        """And does what nobody did before; after how many seconds."""
        await self.desk.create("later")
        async with asyncio.timeout(FAILOVER_S):
            await self.second.operator.until_acting()
        after_s = seconds_since(began_s)
        await self.desk.until_serving("later", decode=1)
        assert await self.holder() == self.second.operator.name
        return after_s


@contextlib.asynccontextmanager
async def two_operators(stage: Stage, folder: Path) -> AsyncIterator[Rivals]:
    await the_shared_one_ends(stage)
    namespace = await a_namespace(stage.cluster, "rivals")
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(a_victim_of(stage, folder, namespace, name=f"{namespace}-first"))
        await first.operator.until_acting()
        second = await stack.enter_async_context(a_victim_of(stage, folder, namespace, name=f"{namespace}-second"))
        await second.operator.until_role("standby")
        await second.desk.create("qwen", prefill={}, decode={})
        await second.desk.until_serving("qwen", prefill=1, decode=1)
        yield Rivals(first, second)
        for model in await second.desk.all(MODELS):
            await second.desk.delete(model["metadata"]["name"])


@pytest_asyncio.fixture(loop_scope="session")
async def rivals(stage: Stage, tmp_path: Path) -> AsyncIterator[Rivals]:
    async with two_operators(stage, tmp_path) as rivals:
        yield rivals


async def test_a_standby_writes_nothing_and_takes_over_after_a_kill(rivals: Rivals) -> None:
    assert await rivals.holder() == rivals.first.operator.name
    assert rivals.first.gate.writes
    assert not rivals.second.gate.writes
    assert not rivals.second.proxy.open_watches, "a standby watches nothing"
    assert (await rivals.second.operator.page("/ready"))[0] == 200
    before = await rivals.desk.pod_uids("qwen")
    killed_s = time.monotonic()
    rivals.first.operator.kill()
    after_s = await rivals.second_acts(killed_s)
    log.info("another operator acts %.2f s after a kill", after_s)
    assert await rivals.desk.pod_uids("qwen") == before, "taking over touches nothing"


async def test_who_is_asked_to_end_hands_over_at_once(rivals: Rivals) -> None:
    asked_s = time.monotonic()
    rivals.first.operator.terminate()
    after_s = await rivals.second_acts(asked_s)
    log.info("another operator acts %.2f s after SIGTERM", after_s)
    assert await rivals.first.operator.ended() == ExitCode.OK
    lease = await rivals.desk.cluster.get(LEASES, LEASE_NAMESPACE, rivals.desk.namespace)
    assert lease is not None
    assert lease["spec"]["leaseTransitions"] == 1


@pytest.mark.exhaustive  # tests/operator/runtime/test_process.py has it with one operator
async def test_who_was_frozen_past_its_lease_writes_nothing_when_it_goes_on(rivals: Rivals) -> None:
    """A Model was changed and another created meanwhile, so that its sockets are full of reasons to write."""
    frozen_s = time.monotonic()
    rivals.first.operator.pause()
    await rivals.desk.edit("qwen", decode={"replicas": 2})
    after_s = await rivals.second_acts(frozen_s)
    log.info("another operator acts %.2f s after SIGSTOP", after_s)
    await rivals.desk.until_serving("qwen", prefill=1, decode=2)
    first = rivals.first
    written = first.gate.written
    await rivals.desk.create("more")
    first.operator.resume()
    assert await first.operator.ended() == ExitCode.FAILURE
    await rivals.desk.until_serving("more", decode=1)
    assert first.gate.written == written, "not even an Event"
    assert await rivals.holder() == rivals.second.operator.name


async def test_who_cannot_reach_the_api_server_is_gone_before_another_acts(stage: Stage, tmp_path: Path) -> None:
    """Where nothing answers, and where connections are refused; side by side, as both have to wait."""
    async with two_operators(stage, tmp_path) as unanswered, two_operators(stage, tmp_path) as refused:
        began_s = time.monotonic()
        unanswered.first.proxy.pause()
        await refused.first.proxy.refuse_connections()
        await asyncio.gather(_is_gone_first(unanswered, began_s), _is_gone_first(refused, began_s))


async def _is_gone_first(rivals: Rivals, cut_s: float) -> None:
    async def gone() -> float:
        assert await rivals.first.operator.ended() == ExitCode.FAILURE
        return seconds_since(cut_s)

    gone_s, acts_s = await asyncio.gather(gone(), rivals.second_acts(cut_s))
    log.info("cut off: it is gone after %.2f s, another acts after %.2f s", gone_s, acts_s)
    assert gone_s < acts_s
