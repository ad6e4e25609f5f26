"""A Model's Redis user and its Secret: when it is written, and that its loss heals."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from antiphon_operator.kube.errors import ApiUnavailable
from antiphon_operator.names import redis_user
from antiphon_operator.plan.observed import Object
from antiphon_operator.plan.planned import RedisAccess
from antiphon_operator.runtime.access import Access
from antiphon_operator.runtime.redis_records import UserAccess
from antiphon_operator.runtime.upkeep import AGAIN_AFTER, STUCK_AFTER

from tests.support.kube_objects import model, pod_of

KEY = b"0123456789abcdef"
USER = redis_user("chat", "qwen")
START = datetime(2026, 1, 1, tzinfo=UTC)


class Users:
    def __init__(self) -> None:
        self.passwords: dict[str, str] = {}

    def put_access(self, access: UserAccess) -> None:
        self.passwords[access.user] = access.password

    def remove_access(self, user: str) -> None:
        self.passwords.pop(user, None)


class Bench:
    def __init__(self) -> None:
        self.users = Users()
        self.secrets: list[str] = []
        self.refuses = False
        self.now = START
        self.pods: list[Object] = []
        self.access = Access(KEY, self.users, self._render, self._apply, lambda: self.now)

    async def grant(self, rotation: str = "", **metadata: Any) -> float:
        about = model(metadata=metadata)
        return await self.access.grant(about, RedisAccess(USER, "qwen-redis", rotation), self.pods)

    async def rest(self, wait: timedelta) -> None:
        """Look whenever it is time to, until `wait` has passed."""
        until = self.now + wait
        while (next_at := self.now + timedelta(seconds=await self.grant())) <= until:
            self.now = next_at
        self.now = until

    def _render(self, about: Object, access: RedisAccess, password: str) -> Object:
        return {"password": password}

    async def _apply(self, manifest: Any) -> None:
        if self.refuses:
            raise ApiUnavailable("apply Secret", 503, "", "not now")
        assert manifest["password"] == self.users.passwords[USER], "Redis knows it before any pod can"
        self.secrets.append(manifest["password"])


def pod(name: str, since: datetime, reason: str = "ContainerCreating", **status: Any) -> Object:
    """On its node since then, and waiting for this reason."""
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": since.isoformat()}
    waiting = [{"name": "worker", "state": {"waiting": {"reason": reason}}}]
    told = {"phase": "Pending", "conditions": [scheduled], "containerStatuses": waiting} | status
    return pod_of(model(), name, status=told)


async def test_one_user_and_one_secret_written_once() -> None:
    bench = Bench()
    await bench.grant()
    await bench.grant()
    assert bench.users.passwords == {USER: bench.secrets[0]}
    assert len(bench.secrets) == 1


async def test_an_operator_that_starts_anew_derives_the_same_password_and_a_namesake_another() -> None:
    first, again, namesake = Bench(), Bench(), Bench()
    await first.grant()
    await again.grant()
    await namesake.grant(uid="another")
    assert first.secrets == again.secrets
    assert first.secrets != namesake.secrets


async def test_another_rotation_is_another_password_in_user_and_secret() -> None:
    bench = Bench()
    await bench.grant("1")
    await bench.grant("2")
    before, now = bench.secrets
    assert before != now == bench.users.passwords[USER]


async def test_a_secret_that_could_not_be_written_is_written_by_the_next_look() -> None:
    bench = Bench()
    bench.refuses = True
    with pytest.raises(ApiUnavailable):
        await bench.grant()
    bench.refuses = False
    await bench.grant()
    assert len(bench.secrets) == 1


async def test_a_secret_that_may_have_been_deleted_is_applied_every_hour_and_not_by_all_at_once() -> None:
    bench = Bench()
    await bench.rest(timedelta(minutes=40))
    assert len(bench.secrets) == 1
    await bench.rest(timedelta(hours=24))
    assert 24 <= len(bench.secrets) <= 33
    times = {await Bench().grant(uid=f"uid-{number}") for number in range(20)}
    assert len(times) == 20
    assert all(0.75 * AGAIN_AFTER.total_seconds() <= time <= AGAIN_AFTER.total_seconds() for time in times)


async def test_a_pod_that_waits_for_its_volumes_has_the_secret_applied_once() -> None:
    bench = Bench()
    await bench.grant()
    bench.now += timedelta(minutes=1)
    bench.pods = [pod("qwen-0", bench.now)]
    assert await bench.grant() == pytest.approx(STUCK_AFTER.total_seconds())
    bench.now += STUCK_AFTER
    await bench.grant()
    assert len(bench.secrets) == 2
    # It may be a slow image as well: then it is at rest.
    await bench.rest(timedelta(minutes=30))
    assert len(bench.secrets) == 2
    bench.pods.append(pod("qwen-1", bench.now))
    await bench.rest(timedelta(minutes=1))
    assert len(bench.secrets) == 3, "once for each pod"


async def test_a_pod_with_an_init_container_that_has_not_begun_waits_for_its_volumes_too() -> None:
    bench = Bench()
    await bench.grant()
    init = [{"name": "init", "state": {"waiting": {"reason": "PodInitializing"}}}]
    bench.pods = [pod("qwen-0", START, "PodInitializing", initContainerStatuses=init)]
    await bench.rest(timedelta(minutes=1))
    assert len(bench.secrets) == 2


@pytest.mark.parametrize(
    "waiting",
    [
        pod("unscheduled", START, conditions=[{"type": "PodScheduled", "status": "False"}], containerStatuses=[]),
        pod("no-image", START, "ImagePullBackOff"),
        pod("initialising", START, initContainerStatuses=[{"name": "init", "state": {"running": {}}}]),
        pod("runs", START, phase="Running", containerStatuses=[{"name": "worker", "state": {"running": {}}}]),
    ],
    ids=lambda waiting: waiting["metadata"]["name"],
)
async def test_a_pod_that_waits_for_something_else_has_nothing_applied(waiting: Object) -> None:
    bench = Bench()
    bench.pods = [waiting]
    await bench.rest(timedelta(minutes=30))
    assert len(bench.secrets) == 1


async def test_a_model_that_is_gone_has_no_user() -> None:
    bench = Bench()
    await bench.grant()
    bench.access.revoke("chat/qwen")
    assert bench.users.passwords == {}
