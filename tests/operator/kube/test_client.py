"""The API client against a server that answers as each test tells it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from antiphon_operator.kube.client import KubeClient
from antiphon_operator.kube.errors import (
    AlreadyExists,
    ApiUnavailable,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    NotLeader,
    Throttled,
)
from antiphon_operator.kube.metrics import API_REQUESTS
from antiphon_operator.kube.resources import EVENTS, MODELS, PODS, SERVICES, UnknownKindError, resource_of
from antiphon_operator.kube.transport import RetryPolicy

from tests.operator.kube.scripted_api import Asked, ScriptedApi, ok, refused, serving

QUICK = RetryPolicy(tries=4, patience_s=5.0, first_wait_s=0.001, longest_wait_s=0.05)
SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "chat", "name": "qwen"}, "spec": {}}
MODEL = {
    "apiVersion": "antiphon.dev/v1alpha1",
    "kind": "Model",
    "metadata": {"namespace": "chat", "name": "qwen", "uid": "u1", "resourceVersion": "7"},
}


@pytest.fixture
async def api() -> AsyncIterator[ScriptedApi]:
    async with serving(ScriptedApi()) as served:
        yield served


@pytest.fixture
async def client(api: ScriptedApi) -> AsyncIterator[KubeClient]:
    opened = api.client(retries=QUICK)
    yield opened
    await opened.close()


def counted(verb: str, kind: str, outcome: str) -> float:
    return float(API_REQUESTS.labels(verb, kind, outcome)._value.get())


async def test_apply_sends_the_manifest_as_our_field_manager_and_takes_fields_over(
    api: ScriptedApi, client: KubeClient
) -> None:
    api.then(ok(SERVICE | {"spec": {"clusterIP": "10.0.0.1"}}))
    applied = await client.apply(SERVICE)
    (asked,) = api.asked
    assert (asked.method, asked.path) == ("PATCH", "/api/v1/namespaces/chat/services/qwen")
    assert asked.query == {"fieldManager": "antiphon-operator", "force": "true"}
    assert asked.headers["Content-Type"] == "application/apply-patch+yaml"
    assert asked.body == SERVICE
    assert applied["spec"]["clusterIP"] == "10.0.0.1"


async def test_a_list_is_read_page_by_page_and_its_items_know_their_kind(api: ScriptedApi, client: KubeClient) -> None:
    api.then(ok({"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "more"}}))
    api.then(ok({"items": [{"metadata": {"name": "b"}}], "metadata": {}}))
    pods = await client.list(PODS, "chat", labels="antiphon.dev/model=qwen", fields="spec.nodeName=n1")
    assert [(pod["metadata"]["name"], pod["kind"]) for pod in pods] == [("a", "Pod"), ("b", "Pod")]
    first, second = api.asked
    assert first.query["labelSelector"] == "antiphon.dev/model=qwen"
    assert first.query["fieldSelector"] == "spec.nodeName=n1"
    assert "continue" not in first.query
    assert second.query["continue"] == "more"


async def test_a_list_that_got_too_old_between_pages_is_begun_anew(api: ScriptedApi, client: KubeClient) -> None:
    api.then(ok({"items": [{"metadata": {"name": "old"}}], "metadata": {"continue": "more"}}))
    api.then(refused(410, "Expired", "the provided continue parameter is too old"))
    api.then(ok({"items": [{"metadata": {"name": "new"}}], "metadata": {}}))
    assert [pod["metadata"]["name"] for pod in await client.list(PODS)] == ["new"]
    assert "continue" not in api.asked[-1].query


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (404, "NotFound", NotFound),
        (409, "Conflict", Conflict),
        (409, "AlreadyExists", AlreadyExists),
        (422, "Invalid", Invalid),
        (400, "BadRequest", Invalid),
        (403, "Forbidden", Forbidden),
    ],
)
async def test_a_refusal_is_a_type_with_the_servers_own_words(
    api: ScriptedApi, client: KubeClient, status: int, reason: str, kind: type[Exception]
) -> None:
    api.then(refused(status, reason, 'services "qwen": spec.ports: Required value'))
    with pytest.raises(kind, match=r"apply Service chat/qwen: .*spec\.ports: Required value") as caught:
        await client.apply(SERVICE)
    assert caught.value.reason == reason  # type: ignore[attr-defined]
    assert len(api.asked) == 1, "a refusal is not tried again"


async def test_not_now_is_asked_again_after_what_the_server_says(api: ScriptedApi, client: KubeClient) -> None:
    throttled = counted("get", "Pod", "throttled")
    api.then(refused(429, "TooManyRequests", "slow down", headers={"Retry-After": "1"}))
    api.then(refused(503, "ServiceUnavailable", "starting"))
    api.then(web.Response(status=502, text="bad gateway"))
    api.then(ok({"metadata": {"name": "p"}}))
    assert (await client.get(PODS, "chat", "p"))["metadata"]["name"] == "p"
    assert len(api.asked) == 4
    assert counted("get", "Pod", "throttled") == throttled + 1


async def test_a_server_that_stays_away_gives_an_error_that_says_when_to_come_back(
    api: ScriptedApi, client: KubeClient
) -> None:
    api.then(refused(429, "TooManyRequests", "slow down", headers={"Retry-After": "7"}))
    with pytest.raises(Throttled, match="slow down") as caught:
        await client.get(PODS, "chat", "p")
    assert caught.value.retry_after_s == 7
    assert len(api.asked) == QUICK.tries


def test_waits_are_those_asked_for_with_jitter_on_top_and_bounded() -> None:
    policy = RetryPolicy(first_wait_s=0.2, longest_wait_s=10.0)
    assert policy.wait_s(1, 3.0, 0.0) == 3.0
    assert 3.0 < policy.wait_s(1, 3.0, 0.99) < 4.0
    assert policy.wait_s(1, 3600.0, 0.99) < 13.0
    assert policy.wait_s(2, None, 0.0) == pytest.approx(0.2)
    assert policy.wait_s(50, None, 0.99) <= 10.0


async def test_a_server_that_does_not_answer_is_given_up(api: ScriptedApi) -> None:
    forever = asyncio.Event()

    async def silent(_: Asked) -> web.Response:
        await forever.wait()
        return web.Response()

    api.then(silent)
    client = api.client(retries=RetryPolicy(tries=1), deadline_s=0.05)
    with pytest.raises(ApiUnavailable, match=r"no answer within 0\.05 s"):
        await client.get(PODS, "chat", "p")
    await client.close()
    forever.set()


async def test_no_server_at_all_is_said_as_what_it_is() -> None:
    api = ScriptedApi(url="http://127.0.0.1:9")
    client = api.client(retries=RetryPolicy(tries=2, first_wait_s=0.001))
    with pytest.raises(ApiUnavailable, match=r"get Pod chat/p: .*127\.0\.0\.1"):
        await client.get(PODS, "chat", "p")
    await client.close()


async def test_only_so_many_requests_are_under_way_at_once(api: ScriptedApi) -> None:
    under_way, most = 0, 0
    full, release = asyncio.Event(), asyncio.Event()

    async def slow(_: Asked) -> web.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if under_way == 3:
            full.set()
        await release.wait()
        under_way -= 1
        return ok({"metadata": {}})

    api.then(slow)
    client = api.client(concurrency=3)
    requests = [asyncio.create_task(client.get(PODS, "chat", f"p{number}")) for number in range(10)]
    async with asyncio.timeout(5):
        await full.wait()
        release.set()
        await asyncio.gather(*requests)
    assert most == 3
    await client.close()


async def test_a_delete_names_the_uid_and_takes_gone_for_done(api: ScriptedApi, client: KubeClient) -> None:
    api.then(ok({"kind": "Status", "status": "Success"}))
    api.then(refused(404, "NotFound", "not found"))
    api.then(refused(409, "Conflict", "the UID in the precondition (a) does not match the UID in record (b)"))
    api.then(refused(409, "Conflict", "something else is in the way"))
    await client.delete(SERVICES, "chat", "qwen", uid="u1", propagation="Foreground")
    await client.delete(SERVICES, "chat", "qwen", uid="u1")
    await client.delete(SERVICES, "chat", "qwen", uid="u1")
    with pytest.raises(Conflict, match="something else"):
        await client.delete(SERVICES, "chat", "qwen", uid="u1")
    assert api.asked[0].body["preconditions"] == {"uid": "u1"}
    assert api.asked[0].body["propagationPolicy"] == "Foreground"


async def test_a_status_is_patched_as_the_subresource_it_is(api: ScriptedApi, client: KubeClient) -> None:
    api.then(ok(MODEL))
    await client.patch_status(MODELS, "chat", "qwen", {"phase": "Ready"})
    (asked,) = api.asked
    assert asked.path == "/apis/antiphon.dev/v1alpha1/namespaces/chat/models/qwen/status"
    assert asked.headers["Content-Type"] == "application/merge-patch+json"
    assert asked.body == {"status": {"phase": "Ready"}}


async def test_an_equal_event_is_counted_and_not_repeated(api: ScriptedApi, client: KubeClient) -> None:
    stored: dict[str, Any] = {}

    async def events(asked: Asked) -> web.Response:
        if asked.method == "POST":
            if asked.body["metadata"]["name"] in stored:
                return refused(409, "AlreadyExists", "exists")
            stored[asked.body["metadata"]["name"]] = asked.body
            return ok(asked.body)
        name = asked.path.rpartition("/")[2]
        if asked.method == "PATCH":
            stored[name].update(asked.body)
        return ok(stored[name])

    api.then(events)
    for _ in range(3):
        await client.post_event(MODEL, "Warning", "NameTaken", "another Model has the name")
    await client.post_event(MODEL, "Warning", "NameTaken", "x" * 5000)
    counted_up, other = stored.values()
    assert counted_up["count"] == 3
    assert counted_up["involvedObject"]["uid"] == "u1"
    assert len(other["message"]) == 1024
    assert api.asked[0].path == EVENTS.path("chat")


async def test_the_last_line_of_a_crashed_containers_log_is_what_is_shown(api: ScriptedApi, client: KubeClient) -> None:
    api.then(web.Response(text="loading\nRuntimeError: CUDA out of memory " + "x" * 500 + "\n\n  \n"))
    line = await client.pod_log_tail("chat", "qwen-0", "worker", previous=True)
    assert line.startswith("RuntimeError: CUDA out of memory")
    assert len(line) == 300
    assert api.asked[0].query["previous"] == "true"
    assert api.asked[0].path == "/api/v1/namespaces/chat/pods/qwen-0/log"


async def test_who_may_not_write_any_more_still_reads_but_sends_no_change(api: ScriptedApi) -> None:
    api.then(ok(SERVICE))
    leader = True
    client = api.client(may_write=lambda: leader)
    await client.apply(SERVICE)
    leader = False
    await client.get(SERVICES, "chat", "qwen")
    changes = (
        client.apply(SERVICE),
        client.create(SERVICES, "chat", SERVICE),
        client.replace(SERVICES, "chat", "qwen", SERVICE),
        client.merge_patch(SERVICES, "chat", "qwen", {}),
        client.patch_status(MODELS, "chat", "qwen", {}),
        client.delete(SERVICES, "chat", "qwen", uid="u1"),
        client.post_event(MODEL, "Normal", "Ready", "ready"),
    )
    for change in changes:
        with pytest.raises(NotLeader):
            await change
    assert [asked.method for asked in api.asked] == ["PATCH", "GET"]
    await client.close()


async def test_permission_is_asked_after_the_wait_for_a_slot(api: ScriptedApi) -> None:
    leader = True
    held, release = asyncio.Event(), asyncio.Event()

    async def slow(_: Asked) -> web.Response:
        held.set()
        await release.wait()
        return ok(SERVICE)

    api.then(slow)
    client = api.client(may_write=lambda: leader, concurrency=1)
    reading = asyncio.create_task(client.get(SERVICES, "chat", "qwen"))
    async with asyncio.timeout(5):
        await held.wait()
        writing = asyncio.create_task(client.apply(SERVICE))
        leader = False
        release.set()
        await reading
        with pytest.raises(NotLeader):
            await writing
    await client.close()


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(UnknownKindError, match="v1 Teapot"):
        resource_of("v1", "Teapot")
