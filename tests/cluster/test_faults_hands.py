"""Hands that delete and edit what a Model is made of: it is put back, an Event names the fields, and what is not ours
is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from antiphon_operator import names

from tests.cluster.faults import truthful
from tests.cluster.history import MODELS, POOLS, Object, label
from tests.cluster.stage import Stage, another_operator
from tests.cluster.support import Desk
from tests.support.kube.resources import (
    CONTROLLER_REVISIONS,
    NETWORK_POLICIES,
    POD_DISRUPTION_BUDGETS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    STATEFULSETS,
    Resource,
)
from tests.support.valkey import Valkey

KEPT_BY_THE_PODS = (POOLS, SERVICES, SERVICE_ACCOUNTS, POD_DISRUPTION_BUDGETS, NETWORK_POLICIES)
CHILDREN = {"prefill": {}, "decode": {"replicas": 2}}
FOREIGN = {"labels": {"team": "chat"}, "annotations": {"example.org/note": "ours"}}

EDITS: dict[str, tuple[Resource, dict[str, Any], str]] = {
    "Service": (SERVICES, {"spec": {"publishNotReadyAddresses": False}}, "spec.publishNotReadyAddresses"),
    "ServiceAccount": (SERVICE_ACCOUNTS, {"automountServiceAccountToken": True}, "automountServiceAccountToken"),
    "PodDisruptionBudget": (POD_DISRUPTION_BUDGETS, {"spec": {"maxUnavailable": 7}}, "spec.maxUnavailable"),
    "NetworkPolicy": (NETWORK_POLICIES, {"spec": {"policyTypes": ["Ingress"]}}, "spec.policyTypes"),
    "Pool": (POOLS, {"spec": {"replicas": 9}}, "spec.replicas"),
    "label of a Service": (SERVICES, {"metadata": {"labels": {names.COMPONENT_LABEL: "mine"}}}, "metadata.labels"),
}
OF_A_REPLICA: dict[str, dict[str, Any]] = {
    "label": {"metadata": {"labels": {names.COMPONENT_LABEL: "mine"}}},
    "mark of draining": {"metadata": {"annotations": {names.DRAINING_SINCE_ANNOTATION: "2026-01-01T00:00:00Z"}}},
    "number of its pods": {"spec": {"replicas": 3}},
    "number of its pods is 0": {"spec": {"replicas": 0}},
}


async def test_children_that_were_deleted_come_back_and_no_pod_is_touched(desk: Desk) -> None:
    await desk.create("qwen", **CHILDREN)
    await desk.until_serving("qwen", prefill=1, decode=2)
    before, since = await desk.pod_uids("qwen"), await desk.version()
    for resource in KEPT_BY_THE_PODS:
        old = await desk.all(resource, "qwen")
        assert old
        for thing in old:
            await desk.cluster.delete(resource, desk.namespace, thing["metadata"]["name"])
        again = await _made_anew(desk, resource, old)
        assert [_said(thing) for thing in again] == [_said(thing) for thing in old]
    await desk.until_serving("qwen", prefill=1, decode=2)
    assert await desk.pod_uids("qwen") == before
    assert len(await desk.all(STATEFULSETS)) == 3
    await truthful(desk, "qwen", since)


async def test_the_revision_in_use_comes_back_under_its_name_and_no_pod_is_touched(desk: Desk) -> None:
    """What it holds is rendered anew from the spec, which is the same."""
    await desk.create("qwen", **CHILDREN)
    await desk.until_serving("qwen", prefill=1, decode=2)
    (revision,), before = await desk.revisions("qwen"), await desk.pod_uids("qwen")
    await desk.cluster.delete(CONTROLLER_REVISIONS, desk.namespace, names.revision_name("qwen", revision))
    await desk.eventually(lambda: desk.revisions("qwen"), lambda found: found == [revision], what="it is there again")
    await desk.until_serving("qwen", prefill=1, decode=2)
    assert await desk.pod_uids("qwen") == before
    await desk.edit("qwen", decode={"replicas": 3})
    await desk.until_serving("qwen", prefill=1, decode=3)
    assert before < await desk.pod_uids("qwen")
    assert await desk.revisions("qwen") == [revision]


async def test_revisions_deleted_in_the_middle_of_a_rollout_do_not_stop_it(desk: Desk) -> None:
    """Both are: that which is coming is rendered anew, and that of the old replicas is not needed to remove them."""
    await desk.create("qwen", engine={"image": "worker:1"}, **CHILDREN)
    await desk.until_serving("qwen", prefill=1, decode=2)
    since = await desk.version()
    await desk.edit("qwen", engine={"image": "slow:2"})
    await desk.eventually(lambda: desk.revisions("qwen"), lambda found: len(found) == 2, what="two revisions")
    for revision in await desk.revisions("qwen"):
        await desk.cluster.delete(CONTROLLER_REVISIONS, desk.namespace, names.revision_name("qwen", revision))
    await desk.until_serving("qwen", prefill=1, decode=2)
    for role, count in (("prefill", 1), ("decode", 2)):
        sets = await desk.until_replicas("qwen", role, count)
        assert {each["spec"]["template"]["spec"]["containers"][0]["image"] for each in sets} == {"slow:2"}
    await truthful(desk, "qwen", since)


async def test_a_replica_that_was_deleted_is_replaced_under_a_new_id(desk: Desk) -> None:
    await desk.create("qwen", **CHILDREN)
    await desk.until_serving("qwen", prefill=1, decode=2)
    old, since = await desk.replica_sets("qwen", "decode"), await desk.version()
    await desk.cluster.delete(STATEFULSETS, desk.namespace, old[0]["metadata"]["name"])
    await desk.eventually(
        lambda: desk.replica_sets("qwen", "decode"),
        lambda sets: len(sets) == 2 and sets != old and old[0]["metadata"]["uid"] not in _uids(sets),
        what="another replica",
    )
    await desk.until_serving("qwen", prefill=1, decode=2)
    new = await desk.until_replicas("qwen", "decode", 2)
    assert old[1]["metadata"]["uid"] in _uids(new)
    ids = {label(each, names.REPLICA_LABEL) for each in new}
    assert label(old[0], names.REPLICA_LABEL) not in ids
    await truthful(desk, "qwen", since)


@pytest.mark.parametrize("edit", EDITS)
async def test_an_edited_field_of_ours_is_put_back_and_an_event_names_it(desk: Desk, edit: str) -> None:
    resource, patch, field = EDITS[edit]
    await desk.create("qwen", **CHILDREN)
    await desk.until_serving("qwen", prefill=1, decode=2)
    thing, before = (await desk.all(resource, "qwen"))[0], await desk.pod_uids("qwen")
    name = thing["metadata"]["name"]
    await desk.cluster.client.merge_patch(resource, desk.namespace, name, patch)
    event = await desk.until_event("qwen", "HandEditPutBack")
    assert f"{resource.kind} {name}: put back" in event["message"]
    assert field in event["message"]
    (back,) = [each for each in await desk.all(resource, "qwen") if each["metadata"]["name"] == name]
    assert _said(back) == _said(thing)
    await desk.until_serving("qwen", prefill=1, decode=2)
    assert await desk.pod_uids("qwen") == before


@pytest.mark.parametrize("edit", OF_A_REPLICA)
async def test_an_edited_replica_is_as_it_was(desk: Desk, edit: str) -> None:
    await desk.create("qwen", decode={"replicas": 2})
    await desk.until_serving("qwen", decode=2)
    (one, other), since = await desk.replica_sets("qwen"), await desk.version()
    name = one["metadata"]["name"]
    await desk.cluster.client.merge_patch(STATEFULSETS, desk.namespace, name, OF_A_REPLICA[edit])

    async def look() -> Object | None:
        return await desk.cluster.get(STATEFULSETS, desk.namespace, name)

    await desk.eventually(
        look, lambda thing: thing is not None and _said(thing) == _said(one), what="the replica is as it was"
    )
    if "number" in edit:
        assert "spec.replicas" in (await desk.until_event("qwen", "HandEditPutBack"))["message"]
    # the status may still be that of before, so the pods are looked at themselves
    await desk.cluster.until_pods(desk.namespace, ready=2)
    await desk.until_serving("qwen", decode=2)
    await desk.until_replicas("qwen", "decode", 2)
    assert {name, other["metadata"]["name"]} == {each["metadata"]["name"] for each in await desk.replica_sets("qwen")}
    await truthful(desk, "qwen", since)


async def test_what_others_write_in_fields_of_their_own_stays(desk: Desk) -> None:
    await desk.create("qwen", **CHILDREN)
    await desk.until_serving("qwen", prefill=1, decode=2)
    before = await desk.pod_uids("qwen")
    written = [
        (resource, thing["metadata"]["name"])
        for resource in (*KEPT_BY_THE_PODS, STATEFULSETS, CONTROLLER_REVISIONS)
        for thing in await desk.all(resource, "qwen")
    ]
    for resource, name in written:
        await desk.cluster.client.merge_patch(resource, desk.namespace, name, {"metadata": FOREIGN})
    # something to do for the operator, so that it has looked at all of them since
    await desk.edit("qwen", decode={"replicas": 3}, sla={"ttft": {"p95": "300ms"}})
    await desk.until_serving("qwen", prefill=1, decode=3)
    for resource, name in written:
        thing = await desk.cluster.get(resource, desk.namespace, name)
        assert thing is not None, name
        assert thing["metadata"]["labels"]["team"] == "chat"
        assert thing["metadata"]["annotations"]["example.org/note"] == "ours"
    assert await desk.events("qwen", "HandEditPutBack") == []
    assert before < await desk.pod_uids("qwen")


async def test_a_secret_that_was_deleted_is_back_with_its_password_after_a_restart(
    stage: Stage, desk: Desk, tmp_path: Path
) -> None:
    """The operator may not read Secrets, so it cannot see that one is missing; but it writes all when it starts."""
    key = tmp_path / "key"
    key.write_bytes(b"a key of the chart's, long enough")
    with Valkey() as valkey:
        async with another_operator(
            stage, tmp_path, name="with-redis", redis_url=valkey.url, credentials_key_file=key
        ) as operator:
            desk.operator = operator
            await desk.create("qwen")
            await desk.until_serving("qwen", decode=1)
            name = names.redis_secret_name("qwen")
            old = await desk.cluster.get(SECRETS, desk.namespace, name)
            assert old is not None
            await desk.cluster.delete(SECRETS, desk.namespace, name)
            operator.terminate()
            await operator.restart()
            await operator.until_acting()

            async def look() -> Object | None:
                return await desk.cluster.get(SECRETS, desk.namespace, name)

            again = await desk.eventually(look, what="the Secret is there again")
            assert again is not None
            assert again["data"] == old["data"], "connections of the pods that run stay good"


async def test_a_model_whose_status_was_emptied_says_it_again(desk: Desk) -> None:
    """Nothing is decided by a status."""
    await desk.create("qwen", **CHILDREN)
    model = await desk.until_serving("qwen", prefill=1, decode=2)
    before, since = await desk.pod_uids("qwen"), await desk.version()
    await desk.cluster.client.merge_patch(MODELS, desk.namespace, "qwen", {"status": None}, subresource="status")
    # a status is no reason to look: whatever else happens is
    await desk.edit("qwen", sla={"ttft": {"p95": "300ms"}})
    again = await desk.until_serving("qwen", prefill=1, decode=2)
    assert again["status"]["revision"]["current"] == model["status"]["revision"]["current"]
    assert await desk.pod_uids("qwen") == before
    await desk.always(lambda world: "" if len(world.replicas("qwen")) == 3 else "a replica more or less", since)


async def _made_anew(desk: Desk, resource: Resource, old: list[Object]) -> list[Object]:
    gone = _uids(old)
    return await desk.eventually(
        lambda: desk.all(resource, "qwen"),
        lambda found: len(found) == len(old) and not _uids(found) & gone,
        what=f"{resource.plural} are there again",
    )


def _uids(things: list[Object]) -> set[str]:
    return {thing["metadata"]["uid"] for thing in things}


def _said(thing: Object) -> Object:
    """Without what the API server or others write."""
    about = thing["metadata"]
    own = {key: text for key, text in (about.get("annotations") or {}).items() if key != names.MEMORY_ANNOTATION}
    rest = {key: value for key, value in thing.items() if key in ("data", "automountServiceAccountToken")}
    rest["spec"] = {key: value for key, value in (thing.get("spec") or {}).items() if not key.startswith("clusterIP")}
    return {"labels": about.get("labels"), "annotations": own, "owners": about.get("ownerReferences"), **rest}
