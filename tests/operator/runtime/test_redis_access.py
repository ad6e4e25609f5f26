"""The user of one Model, on a real Valkey: its workers' scripts work, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from antiphon_kvtransfer import _scripts
from antiphon_kvtransfer._scripts import WriteStatus
from antiphon_kvtransfer.keys import MODELS_KEY, ModelKeys
from antiphon_operator.names import redis_user
from antiphon_operator.runtime.redis_access import AccessNote, UserAccess, following, model_of_user, user_rules
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from tests.support.valkey import Valkey

QWEN = UserAccess(redis_user("chat", "qwen"), "chat/qwen", "uid-1", "new")
OLD = replace(QWEN, password="old")
ROTATING = following(following(None, OLD, 0), QWEN, 0)
BLOCKS = b"0123456789abcdef" * 3


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


@pytest.fixture
def admin(valkey: Valkey) -> Iterator[Redis]:
    redis = Redis.from_url(valkey.url, protocol=2)
    redis.flushall()
    grant(redis, QWEN.user, ROTATING)
    yield redis
    redis.close()


def grant(redis: Redis, user: str, note: AccessNote) -> None:
    redis.execute_command("ACL", "SETUSER", user, *user_rules(note))


def login(valkey: Valkey, user: str, password: str) -> Redis:
    return Redis.from_url(valkey.url, username=user, password=password, protocol=2)


def script(redis: Redis, text: str, keys: tuple[str, ...], *arguments: str | bytes | int) -> list[object]:
    return redis.eval(text, len(keys), *keys, *arguments)  # type: ignore[return-value, arg-type]


def live_a_workers_life(redis: Redis, model: str) -> None:
    """Every script of an announcer, each to its end."""
    keys = ModelKeys(model)
    record, index, blocks = keys.record("w1"), keys.index("w1"), keys.blocks("w1")
    own = (record, index, blocks, keys.workers, keys.events)
    beat = ("w1", "i1", 1, b"{}", 5000, 20_000, 100)
    assert script(redis, _scripts.HEARTBEAT, own, *beat)[0] == WriteStatus.OK
    part, count = keys.part("w1", "t"), 1  # one hash, three times
    assert script(redis, _scripts.WRITE_PART, (part,), BLOCKS[:16], 10_000) == [WriteStatus.OK]
    everything = ("w1", "i1", 1, 5, BLOCKS[16:], count, "t", 20_000, 100)
    assert script(redis, _scripts.WRITE_ALL, (index, blocks, keys.events, part), *everything) == [WriteStatus.OK]
    delta = ("w1", "i1", 5, 6, BLOCKS[:16], b"x" * 16, 20_000, 100)
    assert script(redis, _scripts.WRITE_DELTA, (index, blocks, keys.events), *delta) == [WriteStatus.OK]
    assert script(redis, _scripts.HEARTBEAT, own, *beat) == [WriteStatus.OK, b"6", 1, 1]
    assert script(redis, _scripts.WITHDRAW, own, "w1", "i1", 20_000, 100) == [WriteStatus.OK]


def test_everything_that_a_worker_does_works(admin: Redis, valkey: Valkey) -> None:
    with login(valkey, QWEN.user, "new") as worker:
        live_a_workers_life(worker, "chat/qwen")


def test_nothing_of_another_model_can_be_read_or_written(admin: Redis, valkey: Valkey) -> None:
    with login(valkey, QWEN.user, "new") as worker:
        # A longer and a shorter name, and one that only differs where a pattern might be lax.
        for other in ("chat/qwen2", "chat/qwe", "other/qwen", "chat/q*"):
            with pytest.raises(NoPermissionError):
                live_a_workers_life(worker, other)
            for key in (ModelKeys(other).record("w1"), ModelKeys(other).model_record):
                with pytest.raises(NoPermissionError):
                    worker.get(key)


def test_a_script_that_names_no_key_gets_at_none_either(admin: Redis, valkey: Valkey) -> None:
    other = ModelKeys("chat/other").record("w1")
    admin.set(other, "theirs")
    with login(valkey, QWEN.user, "new") as worker, pytest.raises(ResponseError, match=r"ACL|permission"):
        worker.eval(f"return redis.call('GET', '{other}')", 0)


def test_what_the_operator_writes_is_out_of_reach(admin: Redis, valkey: Valkey) -> None:
    record = ModelKeys("chat/qwen").model_record
    admin.set(record, "the operator's")
    admin.zadd(MODELS_KEY, {"chat/qwen": 1})
    with login(valkey, QWEN.user, "new") as worker:
        for attempt in (
            lambda: worker.get(record),
            lambda: worker.set(record, "mine"),
            lambda: worker.delete(record),
            lambda: worker.zadd(MODELS_KEY, {"chat/mine": 1}),
        ):
            with pytest.raises(NoPermissionError):
                attempt()
    assert admin.get(record) == b"the operator's"


@pytest.mark.parametrize(
    "command",
    [
        "CONFIG GET *",
        "FLUSHALL",
        "FLUSHDB",
        "KEYS *",
        "SCAN 0",
        "ACL LIST",
        "ACL SETUSER antiphon-0123456789abcdef on nopass +@all ~*",
        "MONITOR",
        "SHUTDOWN",
        "REPLICAOF NO ONE",
        "PUBLISH a b",
        "SUBSCRIBE a",
        "CLIENT KILL TYPE normal",
        "SMEMBERS antiphon:{chat%2Fqwen}:blocks:w1",
    ],
)
def test_no_other_command_is_allowed(admin: Redis, valkey: Valkey, command: str) -> None:
    with login(valkey, QWEN.user, "new") as worker, pytest.raises(NoPermissionError):
        worker.execute_command(*command.split())


def test_during_a_rotation_both_passwords_work_and_afterwards_connections_stay(admin: Redis, valkey: Valkey) -> None:
    with login(valkey, QWEN.user, "new") as new, login(valkey, QWEN.user, "old") as old:
        new.ping()
        live_a_workers_life(old, "chat/qwen")
        grant(admin, QWEN.user, following(None, QWEN, 0))
        live_a_workers_life(old, "chat/qwen")
        with login(valkey, QWEN.user, "old") as late, pytest.raises(AuthenticationError):
            late.ping()
        live_a_workers_life(new, "chat/qwen")


def test_of_all_users_only_those_that_we_made_for_a_model_are_ours(admin: Redis) -> None:
    stranger = ["ACL", "SETUSER", "antiphon-0123456789abcdef", "on", ">p", "~antiphon:{chat%2Fqwen}:workers", "+get"]
    admin.execute_command(*stranger)
    admin.execute_command("ACL", "SETUSER", "antiphon-operator", "on", ">p", "~antiphon:*", "+@all")
    odd = UserAccess(redis_user("a-b", "c.d"), "a-b/c.d", "uid-2", "p")
    grant(admin, odd.user, following(None, odd, 0))
    lines = [line.decode() for line in admin.execute_command("ACL", "LIST")]
    ours = [found for line in lines if (found := model_of_user(line)) is not None]
    assert sorted(ours) == sorted([(QWEN.user, "chat/qwen"), (odd.user, "a-b/c.d")])


def test_the_password_before_counts_for_the_overlap_of_one_model_only() -> None:
    first = following(None, OLD, 0)
    assert following(first, OLD, 5) == first
    rotated = following(first, QWEN, 1000)
    assert (rotated.before, rotated.before_until_ms) == (first.current, 181_000)
    assert following(rotated, QWEN, 180_999) == rotated
    assert following(rotated, QWEN, 181_000).before == ""
    namesake = replace(QWEN, uid="uid-2")
    assert following(first, namesake, 1000).before == "", "another Model's password is no password of this one"
