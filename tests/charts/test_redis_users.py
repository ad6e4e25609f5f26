"""The users that the chart gives to Valkey, in a real one: each can do all of its work, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from antiphon_kvtransfer.access import RedisAccess
from antiphon_kvtransfer.announcer import WorkerAnnouncer
from antiphon_kvtransfer.cluster import ClusterMirror
from antiphon_kvtransfer.keys import MODELS_KEY, ModelKeys
from antiphon_kvtransfer.model_record import ModelRecord
from antiphon_kvtransfer.scaling_decisions import read_decisions, read_memory, write_decision
from antiphon_kvtransfer.scaling_news import NewsWriter, read_news
from antiphon_operator.names import redis_user
from antiphon_operator.runtime.redis_access import ACCESS_KEY
from antiphon_operator.runtime.redis_records import RecordWriter, UserAccess
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from tests.support import chart
from tests.support.eventually import eventually
from tests.support.membership import FakeEngine, block, record
from tests.support.record_writing import running
from tests.support.valkey import Valkey

QWEN = ModelRecord(model="chat/qwen", generation=1, names=("qwen",), revisions={"aaaaaa": 1000})
WORKER = UserAccess(redis_user("chat", "qwen"), "chat/qwen", "uid-1", "the worker's")
KEYS = ModelKeys("chat/qwen")


@dataclass(frozen=True)
class Installed:
    """Valkey as the chart starts it."""

    url: str
    folder: Path
    passwords: dict[str, str]

    def access(self, user: str) -> RedisAccess:
        file = self.folder / user
        file.write_text(self.passwords[user])
        return RedisAccess(self.url, user, str(file))

    @contextlib.contextmanager
    def login(self, user: str) -> Iterator[Redis]:
        with Redis.from_url(self.url, username=user, password=self.passwords[user], protocol=2) as client:
            yield client

    def operator(self) -> RecordWriter:
        access = self.access("antiphon-operator")
        return RecordWriter(access.url, access.username, access.password_file, ttl_s=0.4)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    secret = chart.find(chart.render(), "Secret", "antiphon-redis")["stringData"]
    passwords = {secret[f"{who}-username"]: secret[f"{who}-password"] for who in ("operator", "gateway")}
    with Valkey(users=secret["users.acl"]) as server:
        yield Installed(server.url, tmp_path_factory.mktemp("passwords"), passwords | {WORKER.user: WORKER.password})


@contextlib.asynccontextmanager
async def operator_client(installed: Installed) -> AsyncIterator[AsyncRedis]:
    user = "antiphon-operator"
    client = AsyncRedis.from_url(installed.url, username=user, password=installed.passwords[user], protocol=2)
    async with client:
        yield client


@contextlib.asynccontextmanager
async def at_work(part: ClusterMirror | WorkerAnnouncer) -> AsyncIterator[None]:
    task = asyncio.create_task(part.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_nobody_gets_in_without_a_name(installed: Installed) -> None:
    with Redis.from_url(installed.url, protocol=2) as nobody, pytest.raises(AuthenticationError):
        nobody.ping()


async def test_operator_worker_and_gateway_do_all_their_work(
    installed: Installed, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    engine.change({block("a"), block("b")})
    mirror = ClusterMirror(installed.access("antiphon-gateway"), on_change=lambda: None, look_ms=100)
    worker = WorkerAnnouncer(
        installed.access(WORKER.user), record(model="chat/qwen"), engine.snapshot, ttl_ms=2000, list_model=False
    )
    engine.announcer = worker
    async with running(installed.operator()) as operator, at_work(mirror), at_work(worker):
        operator.put(QWEN)
        operator.put_access(WORKER)
        operator.retain_access(lambda key: False)
        operator.retain_records(lambda key: False)
        await eventually(lambda: mirror.model_records().get("chat/qwen") == QWEN)
        await eventually(lambda: "w0" in mirror.workers())
        await eventually(lambda: mirror.blocks.contents("chat/qwen", "w0") == {block("a"), block("b")})
        engine.change({block("c")}, {block("b")})
        await eventually(lambda: mirror.blocks.contents("chat/qwen", "w0") == {block("a"), block("c")})
        assert mirror.healthy
        assert operator.healthy
        await worker.withdraw()
        await eventually(lambda: not mirror.workers())
        operator.remove(QWEN.model)
        operator.remove_access(WORKER.user)
        with installed.login("antiphon-operator") as look:
            await eventually(lambda: WORKER.user not in str(look.execute_command("ACL", "LIST")))
            assert look.hgetall(ACCESS_KEY) == {}
    refusals = [line for line in caplog.messages if "NOPERM" in line or "permission" in line or "does not let" in line]
    assert refusals == []


async def test_gateways_tell_for_scaling_and_the_operator_hears_them_and_remembers(installed: Installed) -> None:
    one, two = (NewsWriter(installed.access("antiphon-gateway"), name) for name in ("one", "two"))
    operator = installed.access("antiphon-operator")
    try:
        with installed.login("antiphon-operator") as client:
            client.hset(KEYS.news, "killed", '{"at_ms":1.0}')
        assert await one.write(QWEN.model, b"news", 1e12)
        assert await two.write(QWEN.model, b"others", 1e12)
        async with operator_client(installed) as redis:
            # What was not readable as news is gone as well, by the other's first write.
            assert await read_news(redis, QWEN.model) == {"two": b"others"}
        assert await two.remove(QWEN.model)
    finally:
        await one.close()
        await two.close()
    await write_decision(operator, QWEN.model, b"memory", b"decision")
    assert await read_memory(operator, QWEN.model) == b"memory"
    assert await read_decisions(operator, QWEN.model) == [b"decision"]


@pytest.mark.parametrize(
    "words",
    [
        f"HSET {KEYS.index('w0')} incarnation mine",
        f"HDEL {KEYS.index('w0')} incarnation",
        f"HKEYS {KEYS.index('w0')}",
        f"PEXPIRE {KEYS.blocks('w0')} 1",
        f"EVAL \"return redis.call('HSET', KEYS[1], 'a', 'mine')\" 1 {KEYS.index('w0')}",
        f"EVAL \"return redis.call('PEXPIRE', KEYS[1], '1')\" 1 {KEYS.model_record}",
        f"EVAL \"return redis.call('HDEL', KEYS[1], 'a')\" 1 {ACCESS_KEY}",
        f"HGETALL {KEYS.news}",
        f"DEL {KEYS.news}",
        f"SET {KEYS.scaling} mine",
        f"XADD {KEYS.decisions} * decision mine",
        f"SET {KEYS.model_record} mine",
        f"DEL {KEYS.model_record}",
        f"ZADD {MODELS_KEY} 1 mine",
        f"XADD {KEYS.events} * a b",
        f"EVAL \"return redis.call('SET', KEYS[1], 'mine')\" 1 {KEYS.model_record}",
        f"EVAL \"return redis.call('PEXPIRE', KEYS[1], '1')\" 1 {MODELS_KEY}",
        f"HGETALL {ACCESS_KEY}",
        f"EVAL \"return redis.call('HGET', '{ACCESS_KEY}', 'a')\" 0",
        "GET another",
        "KEYS *",
        "SCAN 0",
        "FLUSHALL",
        "CONFIG GET *",
        "ACL LIST",
        "ACL SETUSER antiphon-gateway +@all",
        "CLIENT LIST",
        "CLIENT KILL TYPE normal",
        "CLIENT PAUSE 1000",
        "PUBLISH a b",
        "SUBSCRIBE a",
        "SCRIPT FLUSH",
        "MONITOR",
        "SHUTDOWN",
    ],
)
def test_a_gateway_reads_what_it_routes_by_and_nothing_else(installed: Installed, words: str) -> None:
    with installed.login("antiphon-gateway") as gateway:
        assert gateway.get(ModelKeys("chat/none").model_record) is None, "this it may"
        with pytest.raises((NoPermissionError, ResponseError), match=r"NOPERM|permission|ACL"):
            gateway.execute_command(*shlex.split(words))


@pytest.mark.parametrize(
    "words",
    ["SET another 1", "GET another", "FLUSHALL", "CONFIG SET save 1", "CLIENT KILL TYPE normal", "SHUTDOWN", "MONITOR"],
)
def test_the_operator_touches_nothing_beside_its_own(installed: Installed, words: str) -> None:
    with installed.login("antiphon-operator") as operator:
        assert operator.set(KEYS.model_record, "this it may")
        with pytest.raises(NoPermissionError):
            operator.execute_command(*shlex.split(words))


def test_the_page_for_those_without_helm_gives_the_same_rights() -> None:
    page = (chart.ROOT / "docs" / "installation.md").read_text()
    told = re.findall(r'"(user (?:default|antiphon-)[^"]*)"', page)
    made = chart.find(chart.render(), "Secret", "antiphon-redis")["stringData"]["users.acl"].splitlines()

    def rights(line: str) -> str:
        return re.sub(r" [#>]\S+", " PASSWORD", line)

    assert [rights(line) for line in told] == [rights(line) for line in made]
