"""Names that clients use are unique in the cluster: the oldest Model has one, and the others say who."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest_asyncio

from tests.cluster.history import MODELS
from tests.cluster.stage import a_namespace, unique
from tests.cluster.support import Desk, is_so
from tests.support.kube.resources import PODS, STATEFULSETS


@pytest_asyncio.fixture(loop_scope="session")
async def other(desk: Desk) -> AsyncIterator[Desk]:
    """A second namespace."""
    namespace = await a_namespace(desk.cluster, "names-other")
    other = Desk(desk.cluster, desk.operator, desk.history, namespace)
    yield other
    for model in await other.all(MODELS):
        await other.delete(model["metadata"]["name"])


async def test_the_oldest_has_the_name_and_the_other_starts_nothing_until_it_goes(desk: Desk, other: Desk) -> None:
    name = unique("gpt")
    await desk.create("older", names=[name])
    await desk.until_serving("older", decode=1)
    await _next_second()
    await other.create("younger", names=[name])
    loser = await other.until("younger", "Ready", "False", "NameConflict", says=f"{desk.namespace}/older")
    assert name in loser["status"]["conditions"][0]["message"]
    assert await other.all(STATEFULSETS) == []
    assert await other.all(PODS) == []
    await other.until_event("younger", "NameConflict")
    assert is_so(await desk.model("older"), "Ready")
    await desk.delete("older")
    await other.until_serving("younger", decode=1)


async def test_a_loser_becomes_ready_when_it_takes_another_name(desk: Desk, other: Desk) -> None:
    name = unique("gpt")
    await desk.create("older", names=[name])
    await _next_second()
    await other.create("younger", names=[name])
    await other.until("younger", "Ready", "False", "NameConflict")
    await other.edit("younger", names=[unique("gpt")])
    await other.until_serving("younger", decode=1)
    await desk.until_serving("older", decode=1)


async def test_a_model_that_serves_goes_on_serving_when_it_claims_a_name_that_is_taken(desk: Desk, other: Desk) -> None:
    name, own = unique("gpt"), unique("own")
    await desk.create("older", names=[name])
    await _next_second()
    await other.create("younger", names=[own])
    await other.until_serving("younger", decode=1)
    before = await other.pod_uids("younger")
    await other.edit("younger", names=[own, name])
    await other.until("younger", "GatewayReady", "False", "NameConflict", says=f"{desk.namespace}/older")
    await other.until_event("younger", "NameConflict")
    assert await other.pod_uids("younger") == before


async def _next_second() -> None:
    """creationTimestamps have whole seconds, and of equally old Models another rule chooses."""
    born = datetime.now(UTC).replace(microsecond=0)
    while datetime.now(UTC).replace(microsecond=0) <= born:  # noqa: ASYNC110 - only the clock can tell
        await asyncio.sleep(0.02)
