"""An API server that is slow, throttles, fails, loses answers and watches, or is away: the operator gets there, makes
nothing twice, and does not hammer it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest_asyncio
from antiphon_telemetry.exit import ExitCode

from tests.cluster.faults import Victim, a_victim, most_replicas, the_shared_one_ends
from tests.cluster.rollouts import PairedRollout
from tests.cluster.stage import Stage
from tests.cluster.support import Desk
from tests.support.kube.faults import Chances, Fault, Match
from tests.support.kube.resources import STATEFULSETS

log = logging.getLogger(__name__)
PAIRS = {"prefill": 1, "decode": 1}
DEADLINE_S = 100.0
AT_ONCE = 4
REQUESTS, PER_FAULT = 300, 3
"""At most so many for a Model that is created and rolled out once, and so many more for each fault that was met:
about twice what is seen. An operator in a tight loop asks thousands of times in this while."""
NO_FAULT = frozenset({"passed", "watched", "delayed"})

CHANCES = {
    "slow": Chances(latency_s=(0.02, 0.3)),
    "throttled": Chances(too_many_requests=0.1, retry_after_s=1),
    "failing": Chances(server_error=0.25),
    "conflicts": Chances(conflict=0.2),
    "cut off": Chances(disconnect=0.08, lose_answer=0.12),
    "watches too old": Chances(gone=0.5, drop_watch_after_s=(0.1, 0.5)),
    "dropped watches": Chances(drop_watch_after_s=(0.05, 0.5)),
    "all of it": Chances(
        too_many_requests=0.03,
        server_error=0.05,
        conflict=0.05,
        disconnect=0.03,
        lose_answer=0.05,
        gone=0.1,
        drop_watch_after_s=(0.5, 2.0),
        latency_s=(0.0, 0.05),
    ),
}


@pytest_asyncio.fixture(loop_scope="session")
async def alone(stage: Stage) -> AsyncIterator[Stage]:
    await the_shared_one_ends(stage)
    yield stage


async def test_a_model_is_made_and_rolled_out_whatever_befalls_requests(alone: Stage, tmp_path: Path) -> None:
    """Each of CHANCES meets an operator of its own, some side by side, as most of the time they wait."""
    turns = asyncio.Semaphore(AT_ONCE)
    async with asyncio.TaskGroup() as group:
        for name, chances in CHANCES.items():
            group.create_task(_by_chance(alone, tmp_path, name, chances, turns))
        group.create_task(_while_it_is_away(alone, tmp_path))


async def _by_chance(stage: Stage, folder: Path, name: str, chances: Chances, turns: asyncio.Semaphore) -> None:
    """Watches that stand meet nothing any more, so they have to be asked for anew."""
    async with turns, a_victim(stage, folder, f"api-{name}", seed=len(name)) as victim:

        def begin() -> None:
            victim.gate.at_random(chances)
            victim.proxy.drop_watches()

        await _survives(victim, begin)


async def _while_it_is_away(stage: Stage, folder: Path) -> None:
    """In the middle of a rollout, and for longer than the Lease lasts: the operator ends, as another may act by then,
    and is started again."""

    async def away(victim: Victim) -> None:
        await victim.proxy.refuse_connections()
        assert await victim.operator.ended() == ExitCode.FAILURE
        await victim.proxy.accept_connections()
        await victim.revive()

    async with a_victim(stage, folder, "api-away", "--lease-s", "16") as victim, asyncio.TaskGroup() as group:

        def begin_later() -> None:
            group.create_task(away(victim))

        beginnings = iter((lambda: None, begin_later))
        await _survives(victim, lambda: next(beginnings)())


async def test_a_write_whose_answer_was_lost_is_made_once(alone: Stage, tmp_path: Path) -> None:
    """The server did what was asked, each first time, and nobody heard of it."""
    async with a_victim(alone, tmp_path, "api-lost-answers") as victim:
        for resource in ("services", "pools", "controllerrevisions", "statefulsets", "models"):
            victim.gate.script(Fault(lose_answer=True), when=Match(verb="patch", resource=resource))
        await _survives(victim, lambda: None)
        assert victim.gate.unused == 0


async def _survives(victim: Victim, begin: Callable[[], object]) -> None:
    """Two pairs are made and take another image. `begin` is called right before each."""
    desk, asked = victim.desk, victim.gate.asked
    begin()
    await desk.create("qwen", engine={"image": "worker:1"}, prefill={"replicas": 2}, decode={"replicas": 2})
    await _stands(desk)
    since = await desk.version()
    begin()
    await desk.edit("qwen", engine={"image": "worker:2"})
    await _stands(desk)
    victim.gate.clear()
    requests = victim.gate.asked - asked
    counts = dict(victim.proxy.counts)
    log.info("%s: %d requests, %d of them wrote; %s", desk.namespace, requests, len(victim.gate.writes), counts)
    faults = sum(count for what, count in counts.items() if what not in NO_FAULT)
    assert requests < REQUESTS + PER_FAULT * faults
    assert len(await desk.revisions("qwen")) == 2
    assert {pod["spec"]["containers"][0]["image"] for pod in await desk.pods("qwen")} == {"worker:2"}
    assert len(await desk.all(STATEFULSETS)) == 4
    await desk.always(most_replicas("qwen", prefill=3, decode=3))
    await desk.always(PairedRollout("qwen", 2, PAIRS).fault, since)
    assert victim.operator.is_running


async def _stands(desk: Desk) -> None:
    await desk.until_serving("qwen", prefill=2, decode=2, deadline_s=DEADLINE_S)
    for role in PAIRS:
        await desk.until_replicas("qwen", role, 2)
