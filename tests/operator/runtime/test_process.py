"""The operator as a real process against the test API server over HTTP: start, hand-over, kill, faults, and rest.

Its plan is a small one (`tests.support.small_operator`); everything else is real.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from antiphon_operator.kube import resources

from tests.support.kube.cluster import FakeCluster
from tests.support.kube.fault_proxy import FaultProxy
from tests.support.kube.faults import Chances, Faults
from tests.support.kube.resources import EVENTS, LEASES, SERVICES, STATEFULSETS
from tests.support.kube_in_process import served
from tests.support.small_operator import REVISION, OperatorProcess

MODELS, POOLS = served(resources.MODELS), served(resources.POOLS)
QUIET_S = 3.0
"""How long nothing is written in the test of rest; longer than two renewals of the Lease."""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(tmp_path) as cluster:
        await cluster.install_crds()
        await cluster.namespace("chat")
        yield cluster


async def create_models(cluster: FakeCluster, names: list[str], replicas: int = 1, **metadata: Any) -> None:
    for name in names:
        await cluster.create(
            MODELS,
            {
                "apiVersion": "antiphon.dev/v1alpha1",
                "kind": "Model",
                "metadata": {"name": name, "namespace": "chat", **metadata},
                "spec": {"source": {"uri": "demo"}, "decode": {"replicas": replicas}},
            },
        )


def sets(cluster: FakeCluster, model: str = "") -> list[str]:
    names = [found["metadata"]["name"] for found in cluster.api.select(STATEFULSETS, "chat")]
    return sorted(name for name in names if name.startswith(model))


def is_ready(cluster: FakeCluster, name: str) -> bool:
    conditions = (cluster.api.peek(MODELS, "chat", name).get("status") or {}).get("conditions") or ()
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


async def all_ready(cluster: FakeCluster, names: list[str]) -> None:
    await cluster.eventually(lambda: all(is_ready(cluster, name) for name in names), what="all Models Ready")


def creations(cluster: FakeCluster, since: int = 0) -> Counter[str]:
    """StatefulSets that were written, by name and how often."""
    return Counter(each.name for each in cluster.api.requests.mutating(since) if each.resource == "statefulsets")


async def test_fifty_models_that_were_there_before_get_no_duplicates_also_after_a_restart(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    names = [f"model-{number:02d}" for number in range(50)]
    await create_models(cluster, names)
    async with OperatorProcess(cluster.kubeconfig, tmp_path, name="first") as operator:
        await all_ready(cluster, names)
        assert (await operator.page("/ready"))[0] == 200
        operator.signal(signal.SIGKILL)
        await operator.ended()
    _free_lease(cluster)
    assert len(sets(cluster)) == 50
    assert set(creations(cluster).values()) == {1}
    written = cluster.api.requests.total
    async with OperatorProcess(cluster.kubeconfig, tmp_path, name="second") as operator:
        await operator.until_role("acting")
        await create_models(cluster, ["newcomer"])
        await all_ready(cluster, ["newcomer"])
        assert await operator.metric("antiphon_operator_models") == 51
    assert list(creations(cluster, written)) == [f"newcomer-decode-{REVISION}-r000"]


async def test_a_kill_in_the_middle_is_made_good_by_the_next_operator(cluster: FakeCluster, tmp_path: Path) -> None:
    names = [f"model-{number:02d}" for number in range(20)]
    async with OperatorProcess(cluster.kubeconfig, tmp_path, name="first") as operator:
        await operator.until_role("acting")
        await create_models(cluster, names, replicas=2)
        await cluster.eventually(lambda: len(sets(cluster)) >= 5)
        operator.signal(signal.SIGKILL)
        await operator.ended()
    _free_lease(cluster)
    async with OperatorProcess(cluster.kubeconfig, tmp_path, name="second"):
        await all_ready(cluster, names)
    assert len(sets(cluster)) == 40
    assert set(creations(cluster).values()) == {1}


async def test_one_of_two_acts_and_a_signal_hands_over_at_once(cluster: FakeCluster, tmp_path: Path) -> None:
    async with (
        OperatorProcess(cluster.kubeconfig, tmp_path, name="a") as a,
        OperatorProcess(cluster.kubeconfig, tmp_path, name="b") as b,
    ):
        operators = {"a": a, "b": b}
        await cluster.eventually(lambda: _holder(cluster) in operators)
        leader = operators.pop(_holder(cluster))
        (standby,) = operators.values()
        await leader.until_role("acting")
        status, words = await standby.page("/ready")
        assert (status, words) == (200, "ready, standby\n")
        assert await standby.metric("antiphon_operator_leader") == 0
        watches = Counter(each.resource for each in cluster.api.requests.recent if "kopf" in each.user_agent)
        assert watches["models"] == 2, "one listing and one watch: the standby has none"
        await create_models(cluster, ["one"])
        await all_ready(cluster, ["one"])
        leader.signal(signal.SIGTERM)
        assert await leader.ended() == 0
        await standby.until_role("acting")
        await create_models(cluster, ["two"])
        await all_ready(cluster, ["two"])
        standby.signal(signal.SIGTERM)
        assert await standby.ended() == 0
    assert _holder(cluster) == ""
    assert set(creations(cluster).values()) == {1}


async def test_at_rest_nothing_is_written_but_the_lease_and_objects_bear_no_trace_of_the_watcher(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    names = [f"model-{number}" for number in range(5)]
    await create_models(cluster, names)
    async with OperatorProcess(cluster.kubeconfig, tmp_path) as operator:
        await all_ready(cluster, names)
        await cluster.eventually(lambda: len(_settled_pools(cluster)) == 5)
        await cluster.eventually(lambda: len(list(cluster.api.select(EVENTS, "chat"))) == 5)
        before = cluster.api.requests.total
        # Rest is the absence of something: there is nothing to wait for but time.
        await asyncio.sleep(QUIET_S)
        written = cluster.api.requests.mutating(before)
        assert written == []
        assert (await operator.page("/health"))[0] == 200
    for name in names:
        about = cluster.api.peek(MODELS, "chat", name)["metadata"]
        assert "finalizers" not in about
        assert not about.get("annotations")
    writers = {each.manager for each in cluster.api.requests.mutating() if each.resource in ("models", "pools")}
    assert not any("kopf" in writer for writer in writers)


async def test_a_hand_edit_is_put_back_with_an_event_and_a_deleted_child_is_made_anew(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    await create_models(cluster, ["qwen"])
    async with OperatorProcess(cluster.kubeconfig, tmp_path):
        await all_ready(cluster, ["qwen"])
        name = sets(cluster)[0]
        uid = cluster.api.peek(STATEFULSETS, "chat", name)["metadata"]["uid"]
        cluster.api.merge_patch(SERVICES, "chat", "qwen-workers", {"spec": {"selector": {"antiphon.dev/model": "x"}}})
        await cluster.eventually(lambda: "HandEditPutBack" in _event_reasons(cluster))
        selector = cluster.api.peek(SERVICES, "chat", "qwen-workers")["spec"]["selector"]
        assert selector == {"antiphon.dev/model": "qwen"}
        cluster.api.delete(STATEFULSETS, "chat", name)
        await cluster.eventually(lambda: sets(cluster) == [name])
        assert cluster.api.peek(STATEFULSETS, "chat", name)["metadata"]["uid"] != uid
        cluster.api.delete(MODELS, "chat", "qwen")
        await cluster.eventually(lambda: sets(cluster) == [])


async def test_what_happens_while_watches_are_broken_off_is_noticed_afterwards(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    await create_models(cluster, ["qwen"])
    async with OperatorProcess(cluster.kubeconfig, tmp_path) as operator:
        await all_ready(cluster, ["qwen"])
        (name,) = sets(cluster)
        uid = cluster.api.peek(STATEFULSETS, "chat", name)["metadata"]["uid"]
        cluster.server.drop_watches()
        await create_models(cluster, ["llama"])
        await all_ready(cluster, ["llama"])
        # While the operator stands still its watches are broken off, and what happens then is too long ago to be told.
        operator.signal(signal.SIGSTOP)
        cluster.server.drop_watches()
        await asyncio.sleep(0.1)  # The server closes the connections; nothing else can happen meanwhile.
        cluster.api.delete(STATEFULSETS, "chat", name)
        cluster.api.store.compact()
        operator.signal(signal.SIGCONT)
        await cluster.eventually(lambda: name in sets(cluster), what="the deleted StatefulSet is made anew")
        assert cluster.api.peek(STATEFULSETS, "chat", name)["metadata"]["uid"] != uid
        assert await operator.metric("antiphon_operator_ghosts_total") >= 1


async def test_faults_on_the_way_cost_time_and_nothing_else(cluster: FakeCluster, tmp_path: Path) -> None:
    faults = Faults(seed=7)
    async with FaultProxy(cluster.server.url, faults) as proxy:
        kubeconfig = cluster.server.write_kubeconfig(tmp_path / "through-proxy", url=proxy.url)
        async with OperatorProcess(kubeconfig, tmp_path) as operator:
            await operator.until_role("acting")
            faults.at_random(
                Chances(
                    server_error=0.03,
                    conflict=0.05,
                    disconnect=0.02,
                    lose_answer=0.05,
                    gone=0.2,
                    drop_watch_after_s=(0.1, 0.5),
                    latency_s=(0.0, 0.01),
                )
            )
            names = [f"model-{number}" for number in range(10)]
            await create_models(cluster, names, replicas=2)
            await all_ready(cluster, names)
            faults.clear()
            await create_models(cluster, ["last"])
            await all_ready(cluster, ["last"])
            assert (await operator.page("/health"))[0] == 200
            assert sum(count for what, count in proxy.counts.items() if what != "passed") > 5, proxy.counts
    assert len(sets(cluster)) == 21


async def test_only_the_listed_namespaces_are_served(cluster: FakeCluster, tmp_path: Path) -> None:
    await cluster.namespace("lab")
    await create_models(cluster, ["elsewhere"])
    body = {"apiVersion": "antiphon.dev/v1alpha1", "kind": "Model", "spec": {"source": {"uri": "demo"}}}
    await cluster.create(MODELS, body | {"metadata": {"name": "here", "namespace": "lab"}})
    async with OperatorProcess(cluster.kubeconfig, tmp_path, "--namespaces", "lab") as operator:
        await cluster.eventually(lambda: any(cluster.api.select(STATEFULSETS, "lab")))
        await operator.until_role("acting")
        assert await operator.metric("antiphon_operator_models") == 1
    assert sets(cluster) == []


async def test_a_model_whose_plan_raises_says_so_and_the_others_go_on(cluster: FakeCluster, tmp_path: Path) -> None:
    await create_models(cluster, ["bad"], labels={"raises": "1"})
    await create_models(cluster, ["good"])
    async with OperatorProcess(cluster.kubeconfig, tmp_path):
        await all_ready(cluster, ["good"])
        await cluster.eventually(lambda: bool(cluster.api.peek(MODELS, "chat", "bad").get("status")))
    (condition,) = cluster.api.peek(MODELS, "chat", "bad")["status"]["conditions"]
    assert (condition["status"], condition["reason"]) == ("Unknown", "InternalError")


async def test_a_frozen_operator_that_goes_on_writes_nothing(cluster: FakeCluster, tmp_path: Path) -> None:
    async with (
        OperatorProcess(cluster.kubeconfig, tmp_path, name="a") as frozen,
        OperatorProcess(cluster.kubeconfig, tmp_path, name="b") as other,
    ):
        await cluster.eventually(lambda: _holder(cluster) in ("a", "b"))
        if _holder(cluster) == "b":
            frozen, other = other, frozen
        await frozen.until_role("acting")
        frozen.signal(signal.SIGSTOP)
        await create_models(cluster, [f"model-{number}" for number in range(5)])
        await other.until_role("acting")
        await cluster.eventually(lambda: len(_settled_pools(cluster)) == 5)
        before = cluster.api.requests.total
        frozen.signal(signal.SIGCONT)
        assert await frozen.ended() == 1
        assert cluster.api.requests.mutating(before) == []
        assert "another acts" in frozen.log.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--gateway-url", "gateways"), "must look like http://host:port"),
        (("--redis-url", "nowhere"), "redis"),
        (("--lease-s", "0.5"), "--lease-s: a Lease lasts for a second at least, not 0.5"),
        (("--redis-url", "redis://me:secret@host/0", "--redis-username", "me"), "leave it out of the URL"),
        (("--credentials-key-file", "/does/not/exist"), "--credentials-key-file cannot be read"),
    ],
)
async def test_an_option_that_cannot_be_followed_ends_the_start(
    cluster: FakeCluster, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    operator = OperatorProcess(cluster.kubeconfig, tmp_path, *options)
    assert await operator.refused() == 2
    assert words in operator.log.read_text()


async def test_a_cluster_without_models_is_said_in_one_line(tmp_path: Path) -> None:
    async with (
        FakeCluster(tmp_path) as bare,
        OperatorProcess(bare.kubeconfig, tmp_path, "--start-deadline-s", "1") as operator,
    ):
        assert await operator.ended() == 4
    assert "install the chart's CustomResourceDefinitions" in operator.log.read_text()


async def test_an_api_server_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: a\n"
        "contexts: [{name: a, context: {cluster: a, user: a}}]\n"
        "clusters: [{name: a, cluster: {server: 'http://127.0.0.1:1'}}]\nusers: [{name: a, user: {}}]\n"
    )
    async with OperatorProcess(kubeconfig, tmp_path, "--start-deadline-s", "1") as operator:
        assert await operator.ended() == 4
    assert "did not serve Models within 1 s" in operator.log.read_text()


def _holder(cluster: FakeCluster) -> str:
    found = list(cluster.api.select(LEASES, "default"))
    return str(found[0]["spec"].get("holderIdentity") or "") if found else ""


def _settled_pools(cluster: FakeCluster) -> list[str]:
    """Pools whose status, the last thing that is written of a new Model, says that all is there."""
    pools = cluster.api.select(POOLS, "chat")
    return [pool["metadata"]["name"] for pool in pools if (pool.get("status") or {}).get("replicas") == 1]


def _free_lease(cluster: FakeCluster) -> None:
    """As if the Lease of the operator that was killed had run out: not what the test is about."""
    cluster.api.delete(LEASES, "default", "antiphon-operator")


def _event_reasons(cluster: FakeCluster) -> set[str]:
    return {event["reason"] for event in cluster.api.select(EVENTS, "chat")}
