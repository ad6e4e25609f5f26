"""Watches of the double: nothing is missed, nothing is told twice, and a version that is too old is said to be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kube.resources import CONFIG_MAPS, Resource
from tests.support.kube.server import KubeServer
from tests.support.kube.store import Change
from tests.support.kube.wire import Wire, next_event

MAPS = "/api/v1/namespaces/default/configmaps"


@pytest.fixture
async def server() -> AsyncIterator[KubeServer]:
    async with KubeServer() as running:
        yield running
    assert running.failures == []


@pytest.fixture
async def wire(server: KubeServer, tmp_path: Path) -> AsyncIterator[Wire]:
    async with Wire(server.write_kubeconfig(tmp_path / "config")) as client:
        yield client


def put(server: KubeServer, name: str, **labels: str) -> dict[str, Any]:
    return server.api.create(CONFIG_MAPS, "default", {"metadata": {"name": name, "labels": labels}})


def label(server: KubeServer, name: str, **labels: str | None) -> None:
    server.api.merge_patch(CONFIG_MAPS, "default", name, {"metadata": {"labels": labels}})


def told(event: dict[str, Any]) -> tuple[str, str]:
    return event["type"], event["object"]["metadata"].get("name", "")


async def test_a_watch_goes_on_from_where_a_list_was(server: KubeServer, wire: Wire) -> None:
    put(server, "before")
    version = (await wire.ask("GET", MAPS)).body["metadata"]["resourceVersion"]
    put(server, "between")
    async with wire.watch(f"{MAPS}?resourceVersion={version}") as events:
        assert told(await next_event(events)) == ("ADDED", "between")
        label(server, "between", a="b")
        event = await next_event(events)
        assert told(event) == ("MODIFIED", "between")
        assert event["object"]["kind"] == "ConfigMap"
        server.api.delete(CONFIG_MAPS, "default", "between")
        last = await next_event(events)
        assert told(last) == ("DELETED", "between")
        assert int(last["object"]["metadata"]["resourceVersion"]) > int(event["object"]["metadata"]["resourceVersion"])


async def test_without_a_version_what_is_there_comes_first(server: KubeServer, wire: Wire) -> None:
    put(server, "a")
    async with wire.watch(f"{MAPS}?fieldSelector=metadata.name%3Da") as events:
        assert told(await next_event(events)) == ("ADDED", "a")


async def test_initial_events_end_with_a_bookmark(server: KubeServer, wire: Wire) -> None:
    put(server, "a")
    query = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&labelSelector="
    async with wire.watch(f"{MAPS}?{query}") as events:
        kinds = [await next_event(events) for _ in range(3)]
        assert [each["type"] for each in kinds] == ["ADDED", "ADDED", "BOOKMARK"]
        assert kinds[-1]["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


async def test_an_object_enters_and_leaves_a_selection(server: KubeServer, wire: Wire) -> None:
    version = put(server, "a", app="x")["metadata"]["resourceVersion"]
    async with wire.watch(f"{MAPS}?resourceVersion={version}&labelSelector=app%3Dy") as events:
        label(server, "a", app="y")
        assert told(await next_event(events)) == ("ADDED", "a")
        label(server, "a", more="z")
        assert told(await next_event(events)) == ("MODIFIED", "a")
        label(server, "a", app="x")
        assert told(await next_event(events)) == ("DELETED", "a")


async def test_other_namespaces_are_not_told(server: KubeServer, wire: Wire) -> None:
    version = put(server, "a")["metadata"]["resourceVersion"]
    async with wire.watch(f"{MAPS}?resourceVersion={version}") as events:
        server.api.create(CONFIG_MAPS, "kube-system", {"metadata": {"name": "elsewhere"}})
        put(server, "here")
        assert told(await next_event(events)) == ("ADDED", "here")


async def test_a_forgotten_version_is_gone(server: KubeServer, wire: Wire) -> None:
    version = put(server, "a")["metadata"]["resourceVersion"]
    put(server, "b")
    server.api.store.compact(CONFIG_MAPS)
    async with wire.watch(f"{MAPS}?resourceVersion={version}") as events:
        event = await next_event(events)
        assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")
        with pytest.raises(StopAsyncIteration):
            await next_event(events)


async def test_a_page_of_a_forgotten_version_is_gone(server: KubeServer, wire: Wire) -> None:
    put(server, "a")
    put(server, "b")
    page = (await wire.ask("GET", f"{MAPS}?limit=1")).body
    put(server, "c")
    server.api.store.compact(CONFIG_MAPS)
    answer = await wire.ask("GET", f"{MAPS}?limit=1&continue={page['metadata']['continue']}")
    assert (answer.code, answer.body["reason"]) == (410, "Expired")


async def test_a_watch_ends_at_its_timeout_with_a_bookmark(server: KubeServer, wire: Wire) -> None:
    put(server, "a")
    version = str(server.api.store.version)
    async with wire.watch(f"{MAPS}?resourceVersion={version}&timeoutSeconds=0&allowWatchBookmarks=true") as events:
        event = await next_event(events)
        assert (event["type"], event["object"]["metadata"]["resourceVersion"]) == ("BOOKMARK", version)
        with pytest.raises(StopAsyncIteration):
            await next_event(events)


async def test_all_watchers_share_one_serialisation(server: KubeServer) -> None:
    changes: list[Change] = []
    server.api.store.subscribe(changes.append)
    put(server, "a")
    assert changes[0].encoded is changes[0].encoded


async def test_subscribers_hear_in_the_order_of_changes(server: KubeServer) -> None:
    heard: list[tuple[str, str]] = []

    def answer_b_to_a(kind: str, resource: Resource, value: dict[str, Any]) -> None:
        if kind == "ADDED" and value["metadata"]["name"] == "a":
            put(server, "b")

    def note(kind: str, resource: Resource, value: dict[str, Any]) -> None:
        heard.append((kind, value["metadata"]["name"]))

    server.api.subscribe(answer_b_to_a)
    end = server.api.subscribe(note)
    put(server, "a")
    assert heard == [("ADDED", "a"), ("ADDED", "b")]
    end()
    put(server, "c")
    assert len(heard) == 2
