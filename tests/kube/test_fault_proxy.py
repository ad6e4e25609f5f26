"""The fault proxy: what it is told to do it does, to whom it is told, and otherwise it is not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.kube.fault_proxy import FaultProxy
from tests.support.kube.faults import Chances, Fault, Faults, Match, seen
from tests.support.kube.resources import CONFIG_MAPS
from tests.support.kube.server import KubeServer
from tests.support.kube.wire import DEADLINE_S, Wire, next_event

MAPS = "/api/v1/namespaces/default/configmaps"


@pytest.fixture
async def server() -> AsyncIterator[KubeServer]:
    async with KubeServer() as running:
        yield running
    assert running.failures == []


@pytest.fixture
async def proxy(server: KubeServer) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(server.url) as running:
        yield running


@pytest.fixture
async def wire(server: KubeServer, proxy: FaultProxy, tmp_path: Path) -> AsyncIterator[Wire]:
    async with Wire(server.write_kubeconfig(tmp_path / "config", url=proxy.url)) as client:
        yield client


async def test_without_faults_everything_passes(server: KubeServer, wire: Wire) -> None:
    made = await wire.ask("POST", MAPS, {"metadata": {"name": "a"}})
    assert made.code == 201
    assert (await wire.ask("GET", f"{MAPS}/a")).body == made.body
    chosen = await wire.ask("GET", f"{MAPS}?fieldSelector=metadata.name%3Da")
    assert [each["metadata"]["name"] for each in chosen.body["items"]] == ["a"]
    assert server.requests.recent[-1].user == "test-admin"


async def test_a_scripted_fault_meets_the_requests_it_names(proxy: FaultProxy, server: KubeServer, wire: Wire) -> None:
    too_many = Fault(status=429, retry_after_s=1)
    proxy.faults.script(too_many, when=Match(verb="create", resource="configmaps"), times=2, skip=1)
    codes = [(await wire.ask("POST", MAPS, {"metadata": {"name": name}})).code for name in ("a", "b", "c", "d")]
    assert codes == [201, 429, 429, 201]
    assert (await wire.ask("GET", MAPS)).code == 200
    assert proxy.faults.unused == 0
    assert server.requests.by_verb["create"] == 2


async def test_a_refusal_reads_as_the_servers_own(proxy: FaultProxy, wire: Wire) -> None:
    for code, reason in ((409, "Conflict"), (429, "TooManyRequests"), (500, "InternalError"), (410, "Expired")):
        proxy.faults.script(Fault(status=code))
        answer = await wire.ask("GET", MAPS)
        assert (answer.code, answer.body["reason"], answer.body["kind"]) == (code, reason, "Status")


async def test_a_lost_answer_was_done(proxy: FaultProxy, server: KubeServer, wire: Wire) -> None:
    proxy.faults.script(Fault(lose_answer=True), when=Match(verb="create"))
    with pytest.raises(aiohttp.ClientError):
        await wire.ask("POST", MAPS, {"metadata": {"name": "a"}})
    assert server.api.get(CONFIG_MAPS, "default", "a")


async def test_a_cut_connection_was_not_done(proxy: FaultProxy, server: KubeServer, wire: Wire) -> None:
    proxy.faults.script(Fault(disconnect=True), when=Match(verb="create"))
    with pytest.raises(aiohttp.ClientError):
        await wire.ask("POST", MAPS, {"metadata": {"name": "a"}})
    assert server.requests.by_verb["create"] == 0


async def test_a_watch_streams_and_can_be_dropped(proxy: FaultProxy, server: KubeServer, wire: Wire) -> None:
    version = server.api.store.version
    async with wire.watch(f"{MAPS}?resourceVersion={version}") as events:
        server.api.create(CONFIG_MAPS, "default", {"metadata": {"name": "a"}})
        assert (await next_event(events))["object"]["metadata"]["name"] == "a"
        assert proxy.drop_watches("pods") == 0
        assert proxy.drop_watches("configmaps") == 1
        with pytest.raises(aiohttp.ClientError):
            await next_event(events)
    server.api.create(CONFIG_MAPS, "default", {"metadata": {"name": "b"}})
    async with wire.watch(f"{MAPS}?resourceVersion={version}") as events:
        assert [(await next_event(events))["object"]["metadata"]["name"] for _ in range(2)] == ["a", "b"]


async def test_a_watch_can_be_told_that_it_is_too_old(proxy: FaultProxy, wire: Wire) -> None:
    proxy.faults.script(Fault(status=410), when=Match(verb="watch"))
    async with wire.watch(f"{MAPS}?resourceVersion=1") as events:
        event = await next_event(events)
        assert (event["type"], event["object"]["code"]) == ("ERROR", 410)


async def test_a_watch_can_be_dropped_after_a_while(proxy: FaultProxy, wire: Wire) -> None:
    proxy.faults.script(Fault(drop_after_s=0.05), when=Match(verb="watch"))
    async with wire.watch(f"{MAPS}?resourceVersion=1") as events:
        with pytest.raises(aiohttp.ClientError):
            await every(events)
    assert proxy.counts["dropped watch"] == 1


async def test_while_paused_nothing_answers_and_nothing_is_lost(
    proxy: FaultProxy, server: KubeServer, wire: Wire
) -> None:
    async with wire.watch(f"{MAPS}?resourceVersion={server.api.store.version}") as events:
        proxy.pause()
        asked = asyncio.create_task(wire.ask("GET", MAPS))
        heard = asyncio.create_task(next_event(events))
        server.api.create(CONFIG_MAPS, "default", {"metadata": {"name": "a"}})
        done, _ = await asyncio.wait({asked, heard}, timeout=0.2)
        assert done == set()
        proxy.resume()
        assert (await asked).code == 200
        assert (await heard)["object"]["metadata"]["name"] == "a"


async def test_refused_connections_come_back_at_the_same_address(proxy: FaultProxy, wire: Wire) -> None:
    address = proxy.url
    await proxy.refuse_connections()
    with pytest.raises(aiohttp.ClientError):
        await wire.ask("GET", MAPS)
    await proxy.accept_connections()
    assert proxy.url == address
    assert (await wire.ask("GET", MAPS)).code == 200


async def test_a_server_that_is_away_is_a_cut_connection(tmp_path: Path) -> None:
    async with KubeServer() as server, FaultProxy(server.url) as proxy:
        kubeconfig = server.write_kubeconfig(tmp_path / "config", url=proxy.url)
        async with Wire(kubeconfig) as wire:
            assert (await wire.ask("GET", MAPS)).code == 200
            await server.__aexit__(None, None, None)
            with pytest.raises(aiohttp.ClientError):
                await wire.ask("GET", MAPS)
            assert proxy.counts["upstream away"] >= 1


async def every(events: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    async with asyncio.timeout(DEADLINE_S):
        return [event async for event in events]


def test_chance_repeats_itself_by_its_seed() -> None:
    what = seen("PATCH", "/apis/apps/v1/namespaces/default/statefulsets/s", {})
    chances = Chances(too_many_requests=0.2, server_error=0.2, conflict=0.2, latency_s=(0.0, 0.1))

    def fates(seed: int) -> list[Fault]:
        faults = Faults(seed)
        faults.at_random(chances)
        return [faults.for_request(what) for _ in range(200)]

    assert fates(1) == fates(1)
    assert fates(1) != fates(2)
    assert {fault.status for fault in fates(1)} == {0, 409, 429, 500}
    assert all(0 <= fault.latency_s <= 0.1 for fault in fates(1))


@pytest.mark.parametrize(
    ("method", "path", "query", "expected"),
    [
        ("GET", "/api/v1/namespaces/n/pods", {}, ("list", "pods", "", "n", "")),
        ("GET", "/api/v1/pods", {"watch": "true"}, ("watch", "pods", "", "", "")),
        ("GET", "/api/v1/namespaces/n", {}, ("get", "namespaces", "", "", "n")),
        ("PATCH", "/apis/apps/v1/namespaces/n/statefulsets/s/scale", {}, ("patch", "statefulsets", "scale", "n", "s")),
        ("DELETE", "/apis/g/v1/things/t", {}, ("delete", "things", "", "", "t")),
        ("GET", "/version", {}, ("get", "", "", "", "")),
    ],
)
def test_a_request_is_known_by_its_path(
    method: str, path: str, query: dict[str, str], expected: tuple[str, ...]
) -> None:
    what = seen(method, path, query)
    assert (what.verb, what.resource, what.subresource, what.namespace, what.name) == expected
