"""Things go while no operator is there: nothing needs one to go, and the next one finds its way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest_asyncio
import redis.asyncio
from antiphon_kvtransfer.keys import ModelKeys
from antiphon_kvtransfer.model_record import ModelRecord, decode_model_record
from antiphon_operator import names

from tests.cluster.faults import Victim, a_victim, the_shared_one_ends
from tests.cluster.history import MODELS, POOLS, Object
from tests.cluster.stage import Stage
from tests.cluster.support import eventually
from tests.support.kube.resources import (
    CONTROLLER_REVISIONS,
    NAMESPACES,
    NETWORK_POLICIES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    STATEFULSETS,
)
from tests.support.valkey import Valkey

EVERYTHING = (
    MODELS,
    POOLS,
    STATEFULSETS,
    CONTROLLER_REVISIONS,
    SERVICES,
    SERVICE_ACCOUNTS,
    POD_DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
    SECRETS,
    PODS,
)
PAIR: Object = {"prefill": {}, "decode": {}}


@dataclass(frozen=True, slots=True)
class Scene:
    """A dead operator's Model, which had a pair, a user of Redis and a record there."""

    victim: Victim
    client: redis.asyncio.Redis

    async def record(self) -> ModelRecord | None:
        found = await self.client.get(ModelKeys(self.key).model_record)
        assert found is None or isinstance(found, bytes)
        return None if found is None else decode_model_record(found, self.key)

    async def record_ends_in_ms(self) -> int:
        """-2: it is gone."""
        return int(await self.client.pttl(ModelKeys(self.key).model_record))

    async def connections(self) -> int:
        """With ours."""
        return len(await self.client.client_list())

    async def depth(self) -> int:
        """Of the operator's queue."""
        return int((await self.victim.operator.status())["queue_depth"])

    async def user_is_known(self) -> bool:
        return names.redis_user(self.victim.desk.namespace, "qwen") in {
            name.decode() if isinstance(name, bytes) else name for name in await self.client.acl_users()
        }

    @property
    def key(self) -> str:
        return names.model_key(self.victim.desk.namespace, "qwen")

    async def nothing_is_left(self) -> None:
        desk = self.victim.desk

        async def left() -> list[str]:
            return [
                f"{resource.plural} {thing['metadata']['name']}"
                for resource in EVERYTHING
                for thing in await desk.all(resource)
                if thing["metadata"]["name"].startswith("qwen")
            ]

        await desk.eventually(left, lambda found: not found, what="nothing is left, without an operator")


@pytest_asyncio.fixture(loop_scope="session")
async def scene(stage: Stage, tmp_path: Path) -> AsyncIterator[Scene]:
    await the_shared_one_ends(stage)
    key = tmp_path / "key"
    key.write_bytes(b"a key of the chart's, long enough")
    with Valkey() as valkey:
        client = redis.asyncio.Redis.from_url(valkey.url)
        async with a_victim(stage, tmp_path, "gone", redis_url=valkey.url, credentials_key_file=key) as victim:
            scene = Scene(victim, client)
            await victim.desk.create("qwen", engine={"image": "worker:1"}, **PAIR)
            await victim.desk.until_serving("qwen", prefill=1, decode=1)
            await eventually(scene.record, what="a record in Redis")
            victim.operator.kill()
            await victim.operator.ended()
            yield scene
        await client.aclose()


async def test_a_namespace_goes_with_its_models_and_the_next_operator_is_at_rest(scene: Scene) -> None:
    victim, cluster = scene.victim, scene.victim.desk.cluster
    namespace = victim.desk.namespace
    await cluster.delete(NAMESPACES, "", namespace)
    await victim.desk.eventually(
        lambda: cluster.get(NAMESPACES, "", namespace), lambda found: found is None, what="the namespace goes"
    )
    written = len(victim.gate.writes)
    await _revived_without_a_model(scene)
    assert victim.gate.writes[written:] == [], "there is nothing to write"
    assert "error" not in _own_lines(victim)


async def test_a_model_goes_with_all_that_is_its_own_and_its_record_follows(scene: Scene) -> None:
    victim = scene.victim
    await victim.desk.delete("qwen")
    await scene.nothing_is_left()
    written = len(victim.gate.writes)
    await _revived_without_a_model(scene)
    assert victim.gate.writes[written:] == [], "there is nothing to write"
    await scene.nothing_is_left()
    assert "error" not in _own_lines(victim)


async def test_another_model_of_the_same_name_gets_everything_anew(scene: Scene) -> None:
    """Its children have the names of the old ones, which may still be on their way out."""
    victim, desk = scene.victim, scene.victim.desk
    old = {
        thing["metadata"]["uid"]: f"{resource.plural} {thing['metadata']['name']}"
        for resource in EVERYTHING
        for thing in await desk.all(resource)
        if thing["metadata"]["name"].startswith("qwen")
    }
    password = (await desk.all(SECRETS))[0]["data"]
    await desk.delete("qwen")
    model = await desk.create("qwen", engine={"image": "worker:2"}, **PAIR)
    await victim.revive()
    await desk.until_serving("qwen", prefill=1, decode=1)
    for role in ("prefill", "decode"):
        await desk.until_replicas("qwen", role, 1)
    for resource in EVERYTHING:
        for thing in await desk.all(resource):
            about = thing["metadata"]
            if about["name"].startswith("qwen"):
                assert about["uid"] not in old, f"{old.get(about['uid'])} is of the Model before"
                owners = [owner["uid"] for owner in about.get("ownerReferences") or () if owner["kind"] == "Model"]
                assert owners in ([], [model["metadata"]["uid"]])
    assert {pod["spec"]["containers"][0]["image"] for pod in await desk.pods("qwen")} == {"worker:2"}
    assert len(await desk.revisions("qwen")) == 1
    assert (await desk.all(SECRETS))[0]["data"] != password, "a password is of one Model, not of its name"
    revision = (await desk.revisions("qwen"))[0]
    await eventually(
        scene.record,
        lambda record: record is not None and set(record.revisions) == {revision},
        what="a record of the new Model",
    )
    assert await scene.user_is_known()


async def _revived_without_a_model(scene: Scene) -> None:
    """The record is not renewed by an operator that has come to Redis and to rest, so it runs out. The user goes when a
    record would have."""
    ends_in_ms = await scene.record_ends_in_ms()
    await scene.victim.revive()
    await eventually(scene.connections, lambda count: count > 1, what="the operator comes to Redis")
    await eventually(scene.depth, lambda depth: depth == 0, what="it is at rest")
    again_ms = await scene.record_ends_in_ms()
    record = await scene.record()
    assert again_ms < ends_in_ms or record is None or record.deleted
    assert (await scene.victim.operator.status())["models"] == 0


def _own_lines(victim: Victim) -> str:
    """Of the last life: what it complained about."""
    lines = victim.operator.last_lines(400).splitlines()
    begun = max(number for number, line in enumerate(lines) if "configuration:" in line)
    return "\n".join(line for line in lines[begun + 1 :] if " error " in line or "Traceback" in line)
