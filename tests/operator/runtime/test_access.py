"""A Model's Redis user and its Secret: rotation, and the overlap that lets pods follow."""

from __future__ import annotations

from typing import Any

import pytest
from antiphon_operator.kube.errors import ApiUnavailable
from antiphon_operator.names import redis_user
from antiphon_operator.plan.observed import Object
from antiphon_operator.plan.planned import RedisAccess
from antiphon_operator.runtime.access import OVERLAP_S, Access
from antiphon_operator.runtime.redis_records import UserAccess

from tests.support.kube_objects import model

KEY = b"0123456789abcdef"
USER = redis_user("chat", "qwen")


class Users:
    def __init__(self) -> None:
        self.passwords: dict[str, tuple[str, ...]] = {}

    def put_access(self, access: UserAccess) -> None:
        self.passwords[access.user] = tuple(access.passwords)

    def remove_access(self, user: str) -> None:
        self.passwords.pop(user, None)


class Bench:
    def __init__(self) -> None:
        self.users = Users()
        self.secrets: list[str] = []
        self.refuses = False
        self.now_s = 100.0
        self.access = Access(KEY, self.users, self._render, self._apply, clock=lambda: self.now_s)

    async def grant(self, rotation: str = "", **metadata: Any) -> float | None:
        return await self.access.grant(model(metadata=metadata), RedisAccess(USER, "qwen-redis", rotation))

    def _render(self, about: Object, access: RedisAccess, password: str) -> Object:
        return {"password": password}

    async def _apply(self, manifest: Any) -> None:
        if self.refuses:
            raise ApiUnavailable("apply Secret", 503, "", "not now")
        assert manifest["password"] in self.users.passwords[USER], "Redis knows it before any pod can"
        self.secrets.append(manifest["password"])


async def test_one_user_and_one_secret_written_once() -> None:
    bench = Bench()
    assert await bench.grant() is None
    assert await bench.grant() is None
    assert bench.users.passwords == {USER: (bench.secrets[0],)}
    assert len(bench.secrets) == 1


async def test_an_operator_that_starts_anew_derives_the_same_password_and_a_namesake_another() -> None:
    first, again, namesake = Bench(), Bench(), Bench()
    await first.grant()
    await again.grant()
    await namesake.grant(uid="another")
    assert first.secrets == again.secrets
    assert first.secrets != namesake.secrets


async def test_the_password_before_a_rotation_stays_valid_until_all_pods_have_the_new_one() -> None:
    bench = Bench()
    await bench.grant("1")
    bench.now_s += 1000
    assert await bench.grant("2") == pytest.approx(OVERLAP_S)
    before, now = bench.secrets
    assert bench.users.passwords[USER] == (now, before)
    bench.now_s += OVERLAP_S - 1
    assert await bench.grant("2") == pytest.approx(1.0)
    assert before in bench.users.passwords[USER]
    bench.now_s += 1
    assert await bench.grant("2") is None
    assert bench.users.passwords[USER] == (now,)
    assert len(bench.secrets) == 2


async def test_a_secret_that_could_not_be_written_is_written_by_the_next_look() -> None:
    bench = Bench()
    bench.refuses = True
    with pytest.raises(ApiUnavailable):
        await bench.grant()
    bench.refuses = False
    await bench.grant()
    assert len(bench.secrets) == 1


async def test_a_model_that_is_gone_has_no_user() -> None:
    bench = Bench()
    await bench.grant()
    bench.access.revoke("chat/qwen")
    assert bench.users.passwords == {}
