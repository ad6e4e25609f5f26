"""Operators one after the other, as processes, on one Redis: what one began or missed, the next makes good."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from antiphon_operator import names
from antiphon_operator.kube import resources
from antiphon_operator.runtime.redis_access import ACCESS_KEY, decode_note
from redis import Redis

from tests.support.kube.cluster import FakeCluster
from tests.support.kube.kubelets.simulated import Script
from tests.support.kube.operator_process import LEASE_NAMESPACE, OperatorProcess
from tests.support.kube.resources import LEASES, PODS, SECRETS
from tests.support.kube_in_process import served
from tests.support.valkey import Valkey

MODELS = served(resources.MODELS)
KEY = b"a key of the chart's, long enough"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path) as cluster:
        await cluster.install_crds()
        yield cluster


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


class Operators:
    """Each takes over from one that was killed; the Lease of the dead is freed: what it protects is not the theme."""

    def __init__(self, cluster: FakeCluster, valkey: Valkey, folder: Path) -> None:
        self._cluster, self._url, self._folder = cluster, valkey.url, folder
        self.redis = Redis.from_url(valkey.url, protocol=2)
        self._key = folder / "key"
        self._key.write_bytes(KEY)

    def next(self, name: str, *options: str) -> OperatorProcess:
        for lease in self._cluster.api.list(LEASES, LEASE_NAMESPACE):
            self._cluster.api.delete(LEASES, LEASE_NAMESPACE, lease["metadata"]["name"])
        return OperatorProcess(
            self._cluster.kubeconfig,
            self._folder,
            *options,
            name=name,
            redis_url=self._url,
            credentials_key_file=self._key,
        )

    def users(self) -> set[str]:
        return {str(name) for name in self.redis.acl_users()} - {"default"}

    def passwords(self, user: str) -> set[str]:
        """SHA-256 sums."""
        return set(self.redis.acl_getuser(user)["passwords"])


@pytest.fixture
def operators(cluster: FakeCluster, valkey: Valkey, tmp_path: Path) -> Operators:
    return Operators(cluster, valkey, tmp_path)


async def create(cluster: FakeCluster, namespace: str, name: str) -> str:
    """The Redis user that the Model will have."""
    body = {"apiVersion": names.API_VERSION, "kind": "Model", "spec": {"source": {"uri": "demo"}}}
    await cluster.create(MODELS, body | {"metadata": {"name": name, "namespace": namespace}})
    return names.redis_user(namespace, name)


async def test_what_was_deleted_while_no_operator_ran_leaves_redis_where_it_is_watched(
    cluster: FakeCluster, operators: Operators
) -> None:
    for namespace in ("chat", "lab"):
        await cluster.namespace(namespace)
    users = {
        await create(cluster, "chat", "gone"),
        await create(cluster, "chat", "kept"),
        await create(cluster, "lab", "elsewhere"),
    }
    async with operators.next("first"):
        await cluster.eventually(lambda: operators.users() == users)
    for namespace, name in (("chat", "gone"), ("lab", "elsewhere")):
        await cluster.delete(MODELS, namespace, name)
    async with operators.next("second", "--namespaces", "chat") as second:
        await cluster.eventually(lambda: "1 users of Models that are gone leave redis" in second.log.read_text())
    async with operators.next("third") as third:
        await cluster.eventually(lambda: "2 users of Models that are gone leave redis" in third.log.read_text())


async def test_a_rotation_outlives_the_operator_that_began_it(cluster: FakeCluster, operators: Operators) -> None:
    await cluster.namespace("chat")
    user = await create(cluster, "chat", "qwen")
    async with operators.next("first"):
        await cluster.eventually(lambda: user in operators.users())
        (before,) = operators.passwords(user)
        annotations = {"annotations": {names.ROTATE_ANNOTATION: "1"}}
        await cluster.client.merge_patch(MODELS, "chat", "qwen", {"metadata": annotations})
        await cluster.eventually(lambda: len(operators.passwords(user)) == 2)
        both = operators.passwords(user)
    # So that it is seen which of the two operators wrote the user.
    operators.redis.execute_command("ACL", "SETUSER", user, "resetpass")
    async with operators.next("second"):
        await cluster.eventually(lambda: operators.passwords(user) == both)
    note = decode_note(operators.redis.hget(ACCESS_KEY, user))
    assert note is not None
    assert note.before == before


async def test_a_secret_that_was_deleted_comes_back_when_a_pod_cannot_mount_it(
    cluster: FakeCluster, operators: Operators
) -> None:
    await cluster.namespace("chat")
    await cluster.add_node("node-0")
    cluster.simulated.hook = lambda pod, container: Script(start_s=1000.0)
    async with operators.next("first"):
        await create(cluster, "chat", "qwen")
        (pod,) = await cluster.eventually(lambda: on_a_node(cluster))
        (secret,) = cluster.api.list(SECRETS, "chat")
        cluster.api.delete(SECRETS, "chat", secret["metadata"]["name"])
        # As if it had been on its node for long.
        conditions = [each | {"lastTransitionTime": "2026-01-01T00:00:00Z"} for each in pod["status"]["conditions"]]
        status = {"status": {"conditions": conditions}}
        await cluster.client.merge_patch(PODS, "chat", pod["metadata"]["name"], status, subresource="status")
        await cluster.eventually(lambda: cluster.api.list(SECRETS, "chat"), what="the Secret is back")
        (again,) = cluster.api.list(SECRETS, "chat")
        assert again["data"] == secret["data"]


def on_a_node(cluster: FakeCluster) -> list[dict[str, Any]]:
    """Pods whose containers are being created."""
    pods = cluster.api.list(PODS, "chat")
    return [pod for pod in pods if "ContainerCreating" in str(pod["status"].get("containerStatuses"))]
