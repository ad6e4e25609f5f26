"""The token of a Model's gangs: made once, never replaced, and made anew when it is gone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from antiphon_operator.kube.errors import AlreadyExists
from antiphon_operator.plan.observed import Object
from antiphon_operator.runtime.gang_tokens import GangTokens
from antiphon_operator.runtime.upkeep import AGAIN_AFTER, STUCK_AFTER

from tests.support.kube_objects import model, pod_of

START = datetime(2026, 1, 1, tzinfo=UTC)


class Namespace:
    """Whose Secrets the operator may create, and not read."""

    def __init__(self) -> None:
        self.now = START
        self.tokens: dict[str, str] = {}
        self.asked = 0
        self.pods: list[Object] = []

    def operator(self) -> GangTokens:
        return GangTokens(lambda about, token: {"name": "qwen-ray", "token": token}, self._create, lambda: self.now)

    async def _create(self, manifest: Any) -> None:
        self.asked += 1
        if manifest["name"] in self.tokens:
            raise AlreadyExists("create Secret", 409, "AlreadyExists", "secrets qwen-ray already exists")
        self.tokens[manifest["name"]] = manifest["token"]


async def test_a_token_is_made_once_of_32_random_bytes() -> None:
    namespace, other = Namespace(), Namespace()
    tokens = namespace.operator()
    for _ in range(3):
        await tokens.grant(model(), "qwen-ray", [])
    assert namespace.asked == 1
    await other.operator().grant(model(), "qwen-ray", [])
    assert len(bytes.fromhex(namespace.tokens["qwen-ray"])) == 32
    assert namespace.tokens != other.tokens


async def test_another_operator_leaves_the_token_of_running_gangs() -> None:
    namespace = Namespace()
    await namespace.operator().grant(model(), "qwen-ray", [])
    before = dict(namespace.tokens)
    wait_s = await namespace.operator().grant(model(), "qwen-ray", [])
    assert namespace.asked == 2
    assert namespace.tokens == before
    assert 0 < wait_s <= AGAIN_AFTER.total_seconds()


async def test_a_token_that_was_deleted_is_made_anew_for_a_pod_that_waits_for_it() -> None:
    namespace = Namespace()
    tokens = namespace.operator()
    await tokens.grant(model(), "qwen-ray", [])
    namespace.tokens.clear()
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": START.isoformat()}
    waiting = [{"name": "worker", "state": {"waiting": {"reason": "ContainerCreating"}}}]
    status = {"phase": "Pending", "conditions": [scheduled], "containerStatuses": waiting}
    pods = [pod_of(model(), "qwen-0", status=status)]
    assert await tokens.grant(model(), "qwen-ray", pods) <= STUCK_AFTER.total_seconds()
    namespace.now += STUCK_AFTER + timedelta(seconds=1)
    await tokens.grant(model(), "qwen-ray", pods)
    assert "qwen-ray" in namespace.tokens


async def test_a_namesake_gets_a_token_of_its_own() -> None:
    namespace = Namespace()
    tokens = namespace.operator()
    await tokens.grant(model(), "qwen-ray", [])
    namespace.tokens.clear()
    await tokens.grant(model(metadata={"uid": "another"}), "qwen-ray", [])
    assert "qwen-ray" in namespace.tokens
