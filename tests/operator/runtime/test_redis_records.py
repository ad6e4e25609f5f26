"""Records and users of Models in a real Valkey that is emptied, frozen, and that refuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from antiphon_kvtransfer import RedisUrlError
from antiphon_kvtransfer.keys import MODELS_KEY, ModelKeys
from antiphon_kvtransfer.model_record import ModelRecord, decode_model_record
from antiphon_operator.names import redis_user
from antiphon_operator.runtime.redis_access import UserAccess
from antiphon_operator.runtime.redis_records import RecordWriter
from redis import Redis

from tests.support.eventually import eventually
from tests.support.record_writing import running
from tests.support.valkey import Valkey

QWEN = ModelRecord(model="chat/qwen", generation=3, names=("qwen",), revisions={"aaaaaa": 1000})
USER = UserAccess(redis_user("chat", "qwen"), "chat/qwen", "uid-1", "secret")


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


class Seen:
    """What stands in Redis, as a gateway or a person would see it."""

    def __init__(self, valkey: Valkey) -> None:
        self.redis = Redis.from_url(valkey.url, protocol=2)

    def record(self, model: str) -> ModelRecord | None:
        raw = self.redis.get(ModelKeys(model).model_record)
        return decode_model_record(raw, model) if isinstance(raw, bytes) else None

    def models(self) -> list[bytes]:
        return list(self.redis.zrange(MODELS_KEY, 0, -1))  # type: ignore[arg-type]

    def user(self, name: str) -> bool:
        return self.redis.acl_getuser(name) is not None


async def test_a_record_is_written_listed_changed_and_at_last_says_that_the_model_is_gone(valkey: Valkey) -> None:
    seen = Seen(valkey)
    async with running(RecordWriter(valkey.url)) as writer:
        writer.put(QWEN)
        await eventually(lambda: seen.record("chat/qwen") == QWEN)
        assert seen.models() == [b"chat/qwen"]
        draining = ModelRecord(model="chat/qwen", generation=4, names=("qwen",), revisions={}, draining=("w1",))
        writer.put(draining)
        await eventually(lambda: seen.record("chat/qwen") == draining)
        writer.remove("chat/qwen")
        await eventually(lambda: (seen.record("chat/qwen") or draining).deleted)
        for key, longest_ms in ((ModelKeys("chat/qwen").model_record, 60_000), (MODELS_KEY, 3_600_000)):
            assert 0 < seen.redis.pttl(key) <= longest_ms, "nothing stays for ever"  # type: ignore[operator]
        (_, ends_at_ms), *others = seen.redis.zrange(MODELS_KEY, 0, -1, withscores=True)  # type: ignore[misc]
        assert not others
        assert ends_at_ms <= time.time() * 1000 + 60_000


async def test_a_record_is_renewed_while_the_model_is_there_and_no_longer(valkey: Valkey) -> None:
    seen = Seen(valkey)
    key = ModelKeys("chat/qwen").model_record
    async with running(RecordWriter(valkey.url, ttl_s=0.4, outlive_s=0.4)) as writer:
        writer.put(QWEN)
        await eventually(lambda: seen.record("chat/qwen") is not None)
        for _ in range(3):  # Each renewal is seen by the time to live going up.
            before = seen.redis.pttl(key)
            await eventually(lambda: seen.redis.pttl(key) != before and seen.redis.pttl(key) > 300)  # type: ignore[operator]  # noqa: B023
        writer.remove("chat/qwen")
        await eventually(lambda: seen.record("chat/qwen") is None)
        await eventually(lambda: seen.models() == [])


async def test_an_emptied_redis_has_records_and_users_back(valkey: Valkey) -> None:
    async with running(RecordWriter(valkey.url)) as writer:
        writer.put(QWEN)
        writer.put_access(USER)
        seen = Seen(valkey)
        await eventually(lambda: seen.record("chat/qwen") == QWEN and seen.user(USER.user))
        await asyncio.to_thread(valkey.restart_empty)
        seen = Seen(valkey)
        await eventually(lambda: seen.record("chat/qwen") == QWEN and seen.user(USER.user))
        assert seen.models() == [b"chat/qwen"]


async def test_what_was_lost_without_a_restart_is_back_with_the_next_renewal(valkey: Valkey) -> None:
    async with running(RecordWriter(valkey.url, ttl_s=2.0)) as writer:
        writer.put(QWEN)
        writer.put_access(USER)
        seen = Seen(valkey)
        await eventually(lambda: seen.record("chat/qwen") == QWEN and seen.user(USER.user))
        seen.redis.flushall()
        seen.redis.acl_deluser(USER.user)
        await eventually(lambda: seen.record("chat/qwen") == QWEN and seen.user(USER.user))


async def test_while_redis_is_away_nothing_blocks_and_the_last_word_is_written_in_the_end(
    valkey: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    valkey.kill()
    async with running(RecordWriter(valkey.url)) as writer:
        await eventually(lambda: "cannot be written" in caplog.text)
        for generation in range(1000):
            writer.put(ModelRecord(model="chat/qwen", generation=generation, names=("qwen",), revisions={}))
        assert not writer.healthy
        await asyncio.to_thread(valkey.start)
        seen = Seen(valkey)
        await eventually(lambda: (seen.record("chat/qwen") or QWEN).generation == 999)
    assert caplog.text.count("cannot be written") == 1, "an outage is said once"


async def test_three_hundred_models_are_written_in_batches(valkey: Valkey) -> None:
    seen = Seen(valkey)
    async with running(RecordWriter(valkey.url)) as writer:
        for number in range(300):
            writer.put(ModelRecord(model=f"chat/m{number}", generation=1, names=(f"m{number}",), revisions={}))
            writer.put_access(UserAccess(f"antiphon-{number}", f"chat/m{number}", "uid", "p"))
        await eventually(lambda: len(seen.models()) == 300 and len(seen.redis.acl_users()) == 301)  # type: ignore[arg-type]
        assert all(seen.record(f"chat/m{number}") for number in range(300))


async def test_the_operators_own_user_is_used_and_its_password_is_read_at_each_connection(
    valkey: Valkey, tmp_path: Path
) -> None:
    password = tmp_path / "password"
    password.write_text("wrong\n")
    seen = Seen(valkey)
    rules = "on >right ~antiphon:* -@all +@read +@write +@connection +eval +time +acl|setuser +acl|deluser"
    seen.redis.execute_command("ACL", "SETUSER", "antiphon-operator", *rules.split())
    async with running(RecordWriter(valkey.url, "antiphon-operator", str(password))) as writer:
        writer.put(QWEN)
        writer.put_access(USER)
        password.write_text("right\n")
        await eventually(lambda: seen.record("chat/qwen") == QWEN and seen.user(USER.user))


async def test_where_users_may_not_be_kept_records_still_are(
    valkey: Valkey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "password").write_text("p")
    seen = Seen(valkey)
    rules = "on >p ~antiphon:* -@all +@read +@write +@connection +eval +time"
    seen.redis.execute_command("ACL", "SETUSER", "poor", *rules.split())
    async with running(RecordWriter(valkey.url, "poor", str(tmp_path / "password"), ttl_s=0.4)) as writer:
        writer.put_access(USER)
        writer.put(QWEN)
        await eventually(lambda: seen.record("chat/qwen") == QWEN and "give its user the command acl" in caplog.text)
        await eventually(lambda: writer.healthy)
    assert caplog.text.count("give its user the command acl") == 1


async def test_a_record_that_nobody_keeps_any_more_leaves_nothing_even_while_others_are_kept(valkey: Valkey) -> None:
    seen = Seen(valkey)
    async with running(RecordWriter(valkey.url, ttl_s=0.4, outlive_s=0.4)) as writer:
        writer.put(ModelRecord(model="chat/gone", generation=1, names=("gone",), revisions={}))
        await eventually(lambda: seen.record("chat/gone") is not None)
    # The Model is deleted while no operator runs.
    async with running(RecordWriter(valkey.url, ttl_s=0.4, outlive_s=0.4)) as writer:
        writer.put(QWEN)
        await eventually(lambda: seen.models() == [b"chat/qwen"] and seen.record("chat/gone") is None)


async def test_a_record_outlives_the_operator_for_a_gateway_that_starts_meanwhile(valkey: Valkey) -> None:
    seen = Seen(valkey)
    async with running(RecordWriter(valkey.url, ttl_s=0.4)) as writer:
        writer.put(QWEN)
        await eventually(lambda: seen.record("chat/qwen") == QWEN)
    assert seen.redis.pttl(ModelKeys("chat/qwen").model_record) > 3_000_000  # type: ignore[operator]


async def test_records_of_models_that_went_while_no_operator_ran_say_so(valkey: Valkey) -> None:
    seen = Seen(valkey)
    elsewhere = ModelRecord(model="other/qwen", generation=1, names=("o",), revisions={})
    async with running(RecordWriter(valkey.url)) as writer:
        for record in (QWEN, elsewhere, ModelRecord(model="chat/gone", generation=1, names=("gone",), revisions={})):
            writer.put(record)
        await eventually(lambda: len(seen.models()) == 3)
    async with running(RecordWriter(valkey.url)) as writer:
        writer.put(QWEN)
        writer.retain_records(lambda key: key == "chat/gone")
        await eventually(lambda: (seen.record("chat/gone") or QWEN).deleted)
        assert seen.redis.pttl(ModelKeys("chat/gone").model_record) <= 60_000  # type: ignore[operator]
        assert seen.record("chat/qwen") == QWEN
        assert seen.record("other/qwen") == elsewhere


async def test_without_the_right_to_look_for_left_records_the_others_are_written(
    valkey: Valkey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "password").write_text("p")
    seen = Seen(valkey)
    seen.redis.execute_command("ACL", "SETUSER", "blind", *["on", ">p", "~antiphon:*", "+@all", "-zrange"])
    async with running(RecordWriter(valkey.url, "blind", str(tmp_path / "password"))) as writer:
        writer.retain_records(lambda key: True)
        writer.put(QWEN)
        await eventually(lambda: seen.record("chat/qwen") == QWEN)
    assert caplog.text.count("they run out by themselves") == 1


async def test_who_may_not_write_any_more_writes_nothing(valkey: Valkey) -> None:
    seen = Seen(valkey)
    leader = True
    async with running(RecordWriter(valkey.url, may_write=lambda: leader)) as writer:
        writer.put(QWEN)
        await eventually(lambda: seen.record("chat/qwen") == QWEN)
        leader = False
        writer.put(ModelRecord(model="chat/qwen", generation=9, names=("qwen",), revisions={}))
        await eventually(lambda: not writer.healthy)
        assert seen.record("chat/qwen") == QWEN


def test_a_url_that_cannot_be_used_is_refused_at_once() -> None:
    with pytest.raises(RedisUrlError):
        RecordWriter("http://redis:6379")


def test_passwords_do_not_show_in_logs() -> None:
    assert "secret" not in repr(USER)
