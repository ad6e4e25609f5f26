"""What the operator tells gateways and Redis about a Model: the record, the user, its password; and that all of it goes
with the Model."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import redis.asyncio
from antiphon_kvtransfer.keys import MODELS_KEY, ModelKeys
from antiphon_kvtransfer.model_record import ModelRecord, decode_model_record
from antiphon_operator import names
from redis.exceptions import AuthenticationError, NoPermissionError

from tests.cluster.history import MODELS
from tests.cluster.stage import Stage, another_operator
from tests.cluster.support import Desk, eventually
from tests.support.kube.resources import SECRETS
from tests.support.valkey import Valkey

KEY = b"a key of the chart's, long enough"


class Shelf:
    """The Redis, as a gateway reads it."""

    def __init__(self, valkey: Valkey, desk: Desk) -> None:
        self.valkey, self.desk = valkey, desk
        self.client = redis.asyncio.Redis.from_url(valkey.url)

    def key(self, model: str) -> str:
        return names.model_key(self.desk.namespace, model)

    async def record(self, model: str) -> ModelRecord | None:
        raw = await self.client.get(ModelKeys(self.key(model)).model_record)
        assert not isinstance(raw, str)
        return None if raw is None else decode_model_record(raw, self.key(model))

    async def until(self, model: str, holds: Callable[[ModelRecord], object], what: str) -> ModelRecord:
        found = await eventually(
            lambda: self.record(model), lambda record: record is not None and holds(record), what=what
        )
        assert found is not None
        return found

    async def users(self) -> set[str]:
        return {name.decode() if isinstance(name, bytes) else name for name in await self.client.acl_users()}

    def as_model(self, model: str, password: str) -> redis.asyncio.Redis:
        return redis.asyncio.Redis.from_url(
            self.valkey.url, username=names.redis_user(self.desk.namespace, model), password=password
        )

    async def password(self, model: str) -> str:
        async def look() -> object:
            return await self.desk.cluster.get(SECRETS, self.desk.namespace, names.redis_secret_name(model))

        found = await eventually(look, what=f"the Secret of {model}")
        (data,) = found["data"].values()  # type: ignore[index]
        return base64.b64decode(data).decode()


@pytest_asyncio.fixture(loop_scope="session")
async def shelf(stage: Stage, desk: Desk, tmp_path: Path) -> AsyncIterator[Shelf]:
    """With an operator that writes to it."""
    key = tmp_path / "key"
    key.write_bytes(KEY)
    with Valkey() as valkey:
        async with another_operator(
            stage, tmp_path, name="with-redis", redis_url=valkey.url, credentials_key_file=key
        ) as operator:
            desk.operator = operator
            shelf = Shelf(valkey, desk)
            yield shelf
            await shelf.client.aclose()


async def test_gateways_are_told_of_a_model_from_its_start_to_its_end(shelf: Shelf, desk: Desk) -> None:
    rollout = {"drainTimeout": "2s"}
    await desk.create(
        "qwen", names=[desk.namespace], prefill={}, decode={}, engine={"image": "slow:1"}, rollout=rollout
    )
    starting = await shelf.until("qwen", lambda record: True, "there is a record")
    assert starting.waking
    assert not any(starting.revisions.values())
    model = await desk.until_serving("qwen", prefill=1, decode=1)
    old = model["status"]["revision"]["current"]
    record = await shelf.until("qwen", lambda record: record.revisions == {old: 1000}, "all requests go to it")
    assert record.names == (desk.namespace,)
    assert not record.waking
    assert record.draining == ()
    assert shelf.key("qwen").encode() in await shelf.client.zrange(MODELS_KEY, 0, -1)
    assert 0 < await shelf.client.ttl(ModelKeys(shelf.key("qwen")).model_record) <= 3600
    # a promise, and a rollout: the old pair is named as draining before it goes
    going = {f"{thing['metadata']['name']}-0" for thing in await desk.replica_sets("qwen")}
    await desk.edit("qwen", engine={"image": "worker:2"}, sla={"ttft": {"p95": "500ms"}})
    record = await shelf.until("qwen", lambda record: set(record.draining) == going, "the old pair drains")
    assert record.ttft_p95_ms == 500.0
    new = (await desk.until_serving("qwen", prefill=1, decode=1))["status"]["revision"]["current"]
    await shelf.until("qwen", lambda record: record.revisions == {new: 1000} and not record.draining, "only the new")
    await desk.delete("qwen")
    await shelf.until("qwen", lambda record: record.deleted, "gateways are told to forget it")
    assert 0 < await shelf.client.ttl(ModelKeys(shelf.key("qwen")).model_record) <= 60, "then the record runs out"


async def test_a_model_has_a_user_that_may_touch_its_own_keys_only(shelf: Shelf, desk: Desk) -> None:
    await desk.create("qwen")
    await desk.until_serving("qwen", decode=1)
    password = await shelf.password("qwen")
    own = shelf.as_model("qwen", password)
    prefix = ModelKeys(shelf.key("qwen"))
    assert await own.set(prefix.record("a-worker"), b"{}", ex=5)
    with pytest.raises(NoPermissionError):
        await own.set(ModelKeys(names.model_key(desk.namespace, "other")).record("a-worker"), b"{}")
    await own.aclose()
    # a new password on request, without a restart; the one before is good until all pods have the new one
    before = await desk.pod_uids("qwen")
    await desk.annotate(MODELS, "qwen", rotate_credentials="1")
    fresh = await eventually(
        lambda: shelf.password("qwen"), lambda told: told != password, what="another password in the Secret"
    )
    for each in (fresh, password):
        client = shelf.as_model("qwen", each)
        assert await client.get(prefix.record("a-worker")) == b"{}"
        await client.aclose()
    wrong = shelf.as_model("qwen", "wrong")
    with pytest.raises(AuthenticationError):
        await wrong.get(prefix.record("a-worker"))
    await wrong.aclose()
    assert await desk.pod_uids("qwen") == before


async def test_a_redis_that_comes_back_empty_is_told_everything_again(shelf: Shelf, desk: Desk) -> None:
    await desk.create("qwen")
    await desk.until_serving("qwen", decode=1)
    password = await shelf.password("qwen")
    before = await shelf.until("qwen", lambda record: any(record.revisions.values()), "a record")
    shelf.valkey.kill()
    # an outage changes nothing of the Model
    await desk.edit("qwen", decode={"replicas": 2})
    await desk.until_serving("qwen", decode=2)
    shelf.valkey.start()
    again = await eventually(lambda: _answered(shelf), what="the record is back")
    assert again is not None
    assert again.names == before.names
    user = names.redis_user(desk.namespace, "qwen")
    await eventually(shelf.users, lambda users: user in users, what="its user is back")
    own = shelf.as_model("qwen", password)
    assert await own.ping()
    await own.aclose()


async def _answered(shelf: Shelf) -> ModelRecord | None:
    try:
        return await shelf.record("qwen")
    except redis.exceptions.ConnectionError:
        return None
