"""Objects that went without a word of any watch are found, and nothing else is taken for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from antiphon_operator.kube import resources
from antiphon_operator.kube.errors import ApiUnavailable
from antiphon_operator.kube.resources import Object, Resource
from antiphon_operator.names import MANAGED_BY, MANAGED_BY_LABEL
from antiphon_operator.runtime.caches import Caches
from antiphon_operator.runtime.feed import Feed
from antiphon_operator.runtime.ghosts import Ghosts
from antiphon_operator.runtime.kinds import OURS, Watched
from antiphon_operator.runtime.metrics import OperatorMetrics
from prometheus_client import CollectorRegistry

from tests.support.eventually import eventually
from tests.support.kube.resources import NAMESPACES, SERVICES
from tests.support.kube_in_process import InProcessClient, api_with_models, served
from tests.support.kube_objects import owned

KINDS = (Watched(resources.SERVICES, OURS),)


class Client(InProcessClient):
    """`while_listing` happens after the list was made and before its answer is there."""

    fails = 0
    while_listing: Callable[[], object] | None = None

    async def list(
        self, resource: Resource, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> list[Object]:
        if self.fails:
            self.fails -= 1
            raise ApiUnavailable("list Service", 503, "", "not now")
        found = await super().list(resource, namespace, labels=labels, fields=fields)
        if self.while_listing is not None:
            self.while_listing()
        return found


class Bench:
    def __init__(self, settle_s: float = 0.01) -> None:
        self.api = api_with_models()
        self.api.create(NAMESPACES, None, {"metadata": {"name": "chat"}})
        self.client, self.caches = Client(self.api), Caches()
        metrics = OperatorMetrics(CollectorRegistry())
        self.ghosts = Ghosts(self.client.as_client(), self.caches, metrics, KINDS, (), settle_s=settle_s)
        body = {"metadata": {"name": "qwen"}, "spec": {"source": {"uri": "demo"}}}
        made = self.api.create(served(resources.MODELS), "chat", body)
        self.model = {"apiVersion": "antiphon.dev/v1alpha1", "kind": "Model"} | made
        self.woken: list[str] = []
        self.feed = Feed(self.caches, self.woken.append, self.ghosts.suspect)
        self.caches.put("Model", self.model)
        self.feed.begin()
        self.woken.clear()

    def service(self, name: str) -> Object:
        """In the cluster and in the caches."""
        body: dict[str, Any] = owned(self.model, "Service", name)
        spec = {"clusterIP": "None", "ports": [{"port": 1}]}
        metadata = {key: body["metadata"][key] for key in ("name", "labels", "ownerReferences")}
        made: Object = self.api.create(SERVICES, "chat", {"metadata": metadata, "spec": spec})
        self.caches.put("Service", {"apiVersion": "v1", "kind": "Service"} | made)
        return made

    def known(self) -> list[str]:
        return sorted(thing["metadata"]["name"] for thing in self.caches.uids("Service").values())


async def test_the_first_listing_knows_every_kind_also_when_a_try_fails(monkeypatch: Any) -> None:
    monkeypatch.setattr("antiphon_operator.runtime.ghosts._FIRST_RETRY_S", 0.01)
    bench = Bench()
    metadata = {"name": "there", "labels": {MANAGED_BY_LABEL: MANAGED_BY}}
    bench.api.create(SERVICES, "chat", {"metadata": metadata, "spec": {"ports": [{"port": 1}]}})
    bench.client.fails = 1
    await bench.ghosts.list_all()
    assert bench.client.fails == 0
    assert bench.known() == ["there"]


async def test_what_is_not_in_the_cluster_any_more_is_forgotten_and_its_model_looked_at() -> None:
    bench = Bench()
    bench.service("stays")
    bench.service("goes")
    bench.api.delete(SERVICES, "chat", "goes")
    assert await bench.ghosts.compare("Service") == {"chat/qwen"}
    assert bench.known() == ["stays"]
    assert await bench.ghosts.compare("Service") == frozenset()


async def test_what_was_made_while_we_listed_is_no_ghost() -> None:
    bench = Bench()
    bench.client.while_listing = lambda: bench.service("new")
    await bench.ghosts.compare("Service")
    assert bench.known() == ["new"]


async def test_what_no_watch_told_of_is_found_too() -> None:
    bench = Bench()
    metadata = {"name": "unheard", "labels": {MANAGED_BY_LABEL: MANAGED_BY}}
    bench.api.create(SERVICES, "chat", {"metadata": metadata, "spec": {"ports": [{"port": 1}]}})
    await bench.ghosts.compare("Service")
    assert bench.known() == ["unheard"]


async def test_a_kind_that_is_listed_anew_is_compared_also_when_the_first_try_fails(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr("antiphon_operator.runtime.ghosts._RETRY_S", 0.01)
    bench = Bench()
    stays = bench.service("stays")
    bench.service("goes")
    bench.api.delete(SERVICES, "chat", "goes")
    bench.client.fails = 1
    running = asyncio.create_task(bench.ghosts.run(bench.feed))
    try:
        bench.feed.happened("Service", None, {"apiVersion": "v1", "kind": "Service"} | dict(stays))
        await eventually(lambda: bench.known() == ["stays"])
        assert bench.woken == ["chat/qwen"]
        assert bench.client.fails == 0
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
