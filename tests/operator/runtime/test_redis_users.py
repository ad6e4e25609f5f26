"""Users of Models in a real Valkey, from one operator to the next: rotations go on, and nothing of the dead stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from antiphon_operator.names import redis_user
from antiphon_operator.runtime.redis_access import ACCESS_KEY, OVERLAP_S, UserAccess
from antiphon_operator.runtime.redis_records import RecordWriter
from antiphon_operator.runtime.redis_users import unix_ms
from redis import Redis
from redis.exceptions import AuthenticationError

from tests.support.eventually import eventually
from tests.support.record_writing import running
from tests.support.valkey import Valkey


def access(model: str, *, namespace: str = "chat", uid: str = "uid-1", password: str = "first") -> UserAccess:
    return UserAccess(redis_user(namespace, model), f"{namespace}/{model}", uid, password)


QWEN = access("qwen")
ROTATED = access("qwen", password="second")


class Shelf:
    """A server, and operators one after the other whose time a test sets forward."""

    def __init__(self, valkey: Valkey) -> None:
        self.valkey = valkey
        self.redis = Redis.from_url(valkey.url, protocol=2)
        self.later_ms = 0

    def operator(self) -> RecordWriter:
        return RecordWriter(self.valkey.url, ttl_s=0.4, now_ms=lambda: unix_ms() + self.later_ms)

    def users(self) -> set[str]:
        return {str(name) for name in self.redis.acl_users()} - {"default"}  # type: ignore[union-attr]

    def noted(self) -> set[str]:
        return {name.decode() for name in self.redis.hkeys(ACCESS_KEY)}  # type: ignore[union-attr]

    def opens(self, *passwords: str) -> bool:
        """Each of these passwords of qwen's, and no other of the three."""
        return [word for word in ("first", "second", "third") if self._opens(word)] == list(passwords)

    def _opens(self, password: str) -> bool:
        with Redis.from_url(self.valkey.url, username=QWEN.user, password=password, protocol=2) as client:
            try:
                return bool(client.ping())
            except AuthenticationError:
                return False


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with Valkey() as server:
        shelf = Shelf(server)
        yield shelf
        shelf.redis.close()


async def test_a_user_goes_one_time_to_live_after_its_model_unless_it_comes_back(shelf: Shelf) -> None:
    other = access("other")
    async with running(shelf.operator()) as writer:
        writer.put_access(QWEN)
        writer.put_access(other)
        await eventually(lambda: shelf.users() == {QWEN.user, other.user})
        writer.remove_access(QWEN.user)
        writer.remove_access(other.user)
        writer.put_access(other)
        await eventually(lambda: shelf.users() == shelf.noted() == {other.user})


async def test_the_password_before_a_rotation_is_dropped_after_the_overlap(shelf: Shelf) -> None:
    async with running(shelf.operator()) as writer:
        writer.put_access(QWEN)
        await eventually(lambda: shelf.opens("first"))
        writer.put_access(ROTATED)
        await eventually(lambda: shelf.opens("first", "second"))
        shelf.later_ms = int(OVERLAP_S * 1000)
        await eventually(lambda: shelf.opens("second"))


async def test_an_operator_that_takes_over_keeps_the_password_before_for_the_rest_of_the_overlap(shelf: Shelf) -> None:
    async with running(shelf.operator()) as writer:
        writer.put_access(QWEN)
        await eventually(lambda: shelf.opens("first"))
        writer.put_access(ROTATED)
        await eventually(lambda: shelf.opens("first", "second"))
    shelf.later_ms = int(OVERLAP_S * 1000) - 60_000
    async with running(shelf.operator()) as writer:
        writer.put_access(ROTATED)
        writer.put_access(access("other"))
        await eventually(lambda: len(shelf.users()) == 2)
        assert shelf.opens("first", "second")
        shelf.later_ms += 60_000
        await eventually(lambda: shelf.opens("second"))


async def test_a_rotation_that_was_asked_for_while_no_operator_ran_has_its_overlap(shelf: Shelf) -> None:
    async with running(shelf.operator()) as writer:
        writer.put_access(QWEN)
        await eventually(lambda: shelf.opens("first"))
    async with running(shelf.operator()) as writer:
        writer.put_access(ROTATED)
        await eventually(lambda: shelf.opens("first", "second"))


async def test_an_overlap_goes_on_in_a_redis_that_came_back_empty(shelf: Shelf) -> None:
    async with running(shelf.operator()) as writer:
        writer.put_access(QWEN)
        await eventually(lambda: shelf.opens("first"))
        writer.put_access(ROTATED)
        await eventually(lambda: shelf.opens("first", "second"))
        shelf.valkey.restart_empty()
        shelf.redis = Redis.from_url(shelf.valkey.url, protocol=2)
        await eventually(lambda: shelf.opens("first", "second"))


async def test_a_namesake_does_not_take_the_passwords_of_the_model_before(shelf: Shelf) -> None:
    async with running(shelf.operator()) as writer:
        writer.put_access(QWEN)
        await eventually(lambda: shelf.opens("first"))
    async with running(shelf.operator()) as writer:
        writer.put_access(access("qwen", uid="uid-2", password="second"))
        await eventually(lambda: shelf.opens("second"))


async def test_users_of_models_that_were_deleted_while_no_operator_ran_go(shelf: Shelf) -> None:
    kept, gone, unlooked = access("kept"), access("gone"), access("unlooked")
    async with running(shelf.operator()) as writer:
        for each in (kept, gone, unlooked):
            writer.put_access(each)
        await eventually(lambda: len(shelf.users()) == 3)
    shelf.redis.execute_command("ACL", "SETUSER", "antiphon-0123456789abcdef", "on", "~other:*", "+get")
    async with running(shelf.operator()) as writer:
        writer.put_access(kept)
        writer.retain_access(lambda key: key == "chat/gone")
        await eventually(lambda: gone.user not in shelf.users())
        # The one whose Model has not been looked at yet stays, and so does what is not ours.
        assert shelf.users() == {kept.user, unlooked.user, "antiphon-0123456789abcdef"}
        assert shelf.noted() == {kept.user, unlooked.user}


async def test_a_user_that_only_its_rules_tell_of_goes_too(shelf: Shelf) -> None:
    async with running(shelf.operator()) as writer:
        writer.put_access(QWEN)
        await eventually(lambda: shelf.opens("first"))
    shelf.redis.flushall()
    async with running(shelf.operator()) as writer:
        writer.retain_access(lambda key: True)
        await eventually(lambda: shelf.users() == set())


async def test_a_model_that_gets_no_access_any_more_loses_a_user_from_an_operator_before(shelf: Shelf) -> None:
    async with running(shelf.operator()) as writer:
        writer.put_access(QWEN)
        await eventually(lambda: shelf.opens("first"))
    async with running(shelf.operator()) as writer:
        writer.retain_access(lambda key: False)
        await eventually(lambda: writer.healthy)
        writer.remove_access(QWEN.user)
        await eventually(lambda: shelf.users() == set())


async def test_without_operators_the_notes_do_not_stay_for_ever(shelf: Shelf) -> None:
    async with running(shelf.operator()) as writer:
        writer.put_access(QWEN)
        await eventually(lambda: shelf.noted() == {QWEN.user})
        await eventually(lambda: shelf.redis.ttl(ACCESS_KEY) > 3600)  # type: ignore[operator]


async def test_no_password_stands_in_the_notes(shelf: Shelf) -> None:
    async with running(shelf.operator()) as writer:
        writer.put_access(QWEN)
        await eventually(lambda: shelf.noted() == {QWEN.user})
    assert b"first" not in shelf.redis.hget(ACCESS_KEY, QWEN.user)  # type: ignore[operator]
