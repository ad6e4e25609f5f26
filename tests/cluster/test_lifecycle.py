"""From the ten-line Model to a served one, and what people see on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from antiphon_operator import names

from tests.cluster.history import LONGEST_LIE_S, MODELS, POOLS, World, label, longest_lies_s
from tests.cluster.support import Desk, is_so, message
from tests.support.kube.kubelets.client import Refused
from tests.support.kube.resources import (
    CONTROLLER_REVISIONS,
    JOBS,
    NAMESPACES,
    NETWORK_POLICIES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    SERVICE_ACCOUNTS,
    SERVICES,
    STATEFULSETS,
)

TEN_LINES = Path(__file__).parents[2] / "deploy" / "samples" / "demo.yaml"
CHILDREN = (
    POOLS,
    STATEFULSETS,
    CONTROLLER_REVISIONS,
    SERVICES,
    SERVICE_ACCOUNTS,
    POD_DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
    JOBS,
    PODS,
)


async def test_ten_lines_give_a_prefill_pool_and_a_decode_pool_that_serve(desk: Desk) -> None:
    sample = yaml.safe_load(TEN_LINES.read_text())
    name = sample["metadata"]["name"]
    await desk.create(name, **sample["spec"])
    model = await desk.until_serving(name, prefill=1, decode=1)
    assert model["status"]["phase"] == "Running"
    assert model["status"]["pools"]["prefill"]["summary"] == "1/1"
    assert is_so(model, "SourceReady")
    assert is_so(model, "PoolsReady")
    effective = model["status"]["effective"]
    assert effective["names"] == [name]
    assert effective["engine"]["name"] == "torch"
    assert effective["accelerator"] == {"resource": "none"}
    assert effective["decode"]["replicas"] == 1
    assert effective["decode"]["gpusPerPod"] == 1
    assert effective["rollout"]["surge"] == 1
    revision = model["status"]["revision"]["current"]
    assert await desk.revisions(name) == [revision]
    assert model["status"]["resolved"]["image"]


async def test_the_children_are_those_that_the_documents_name_and_belong_to_the_model(desk: Desk) -> None:
    model = await desk.create("qwen", prefill={})
    model = await desk.until_serving("qwen", prefill=1, decode=1)
    revision = model["status"]["revision"]["current"]
    found = {
        resource.plural: [thing["metadata"] for thing in await desk.all(resource, "qwen")] for resource in CHILDREN
    }

    def named(plural: str) -> list[str]:
        return [metadata["name"] for metadata in found[plural]]

    assert named("pools") == ["qwen-decode", "qwen-prefill"]
    assert named("services") == ["qwen-workers"]
    assert named("serviceaccounts") == ["qwen-worker"]
    assert named("poddisruptionbudgets") == ["qwen-decode", "qwen-prefill"]
    assert named("networkpolicies") == ["qwen-workers"]
    assert named("jobs") == []
    assert f"qwen-{revision}" in named("controllerrevisions")
    decode, prefill = await desk.replica_sets("qwen")
    for thing, role in ((decode, "decode"), (prefill, "prefill")):
        replica = label(thing, names.REPLICA_LABEL)
        assert thing["metadata"]["name"] == f"qwen-{role}-{revision}-{replica}"
        assert thing["spec"]["podManagementPolicy"] == "Parallel"
    for plural, things in found.items():
        for metadata in things:
            owners = [owner["uid"] for owner in metadata["ownerReferences"] if owner["kind"] == "Model"]
            if plural not in ("pods", "controllerrevisions"):
                assert owners == [model["metadata"]["uid"]], f"{plural} {metadata['name']}"
    assert not any("finalizers" in metadata for things in found.values() for metadata in things)
    assert "finalizers" not in model["metadata"]


async def test_kubectl_shows_a_model_in_one_line(desk: Desk) -> None:
    await desk.create("qwen", prefill={}, decode={"replicas": 2}, sla={"ttft": {"p95": "500ms"}})
    await desk.until_serving("qwen", prefill=1, decode=2)
    head, line = (await desk.kubectl("get", "models")).splitlines()
    assert head.split() == ["NAME", "READY", "PREFILL", "DECODE", "TTFT", "TPOT", "AGE"]
    assert line.split()[:5] == ["qwen", "True", "1/1", "2/2", "-/500ms"]
    pools = (await desk.kubectl("get", "mpool")).splitlines()
    assert [line.split()[:5] for line in pools[1:]] == [
        ["qwen-decode", "decode", "2", "2", "2"],
        ["qwen-prefill", "prefill", "1", "1", "1"],
    ]


async def test_a_model_is_not_ready_before_a_pair_is_and_says_what_it_waits_for(desk: Desk) -> None:
    await desk.create("qwen", engine={"image": "slow:1"}, prefill={}, decode={})
    starting = await desk.until("qwen", "Ready", "False", "Starting", says="is starting")
    assert starting["status"]["phase"] == "Starting"
    assert "starting" in message(starting, "PoolsReady")
    assert "RolloutComplete" in await desk.kubectl("describe", "model", "qwen")
    await desk.until_serving("qwen", prefill=1, decode=1)

    def too_early(world: World) -> str:
        roles = {replica.role for replica in world.replicas("qwen") if replica.ready}
        ready = world.condition("qwen", "Ready").get("status") == "True"
        return "it is Ready without a pair" if ready and roles != {"prefill", "decode"} else ""

    await desk.always(too_early)


async def test_without_a_prefill_pool_decode_workers_do_both(desk: Desk) -> None:
    await desk.create("qwen", decode={"replicas": 2})
    model = await desk.until_serving("qwen", decode=2)
    assert [pool["metadata"]["name"] for pool in await desk.all(POOLS)] == ["qwen-decode"]
    assert "prefill" not in model["status"]["pools"]
    assert "prefill" not in model["status"]["effective"]
    assert model["status"]["conditions"]
    for pod in await desk.pods("qwen"):
        args = pod["spec"]["containers"][0]["args"]
        assert args[args.index("--role") + 1] == "both"


async def test_a_model_that_loses_its_workers_says_so_within_five_seconds(desk: Desk) -> None:
    await desk.create("qwen", prefill={}, decode={})
    await desk.until_serving("qwen", prefill=1, decode=1)
    (pod,) = await desk.pods("qwen", "decode")
    desk.cluster.simulated.set_ready(desk.namespace, pod["metadata"]["name"], False)  # type: ignore[attr-defined]
    lost = await desk.until("qwen", "Ready", "False")
    assert lost["status"]["phase"] == "Degraded"
    desk.cluster.simulated.set_ready(desk.namespace, pod["metadata"]["name"], True)  # type: ignore[attr-defined]
    await desk.until_serving("qwen", prefill=1, decode=1)
    assert longest_lies_s(await desk.worlds())["qwen"] < LONGEST_LIE_S


async def test_a_deleted_model_leaves_nothing_behind(desk: Desk) -> None:
    await desk.create("gone", prefill={}, decode={"replicas": 2})
    await desk.create("stays")
    await desk.until_serving("gone", prefill=1, decode=2)
    await desk.until_serving("stays", decode=1)
    before = await desk.pod_uids("stays")
    await desk.delete("gone")

    async def left() -> list[str]:
        return [
            f"{resource.plural} {thing['metadata']['name']}"
            for resource in (MODELS, *CHILDREN)
            for thing in await desk.all(resource)
            if thing["metadata"]["name"].startswith("gone")
        ]

    await desk.eventually(left, lambda found: not found, what="nothing of the Model is left")
    assert await desk.pod_uids("stays") == before


async def test_a_namespace_goes_with_all_its_models(desk: Desk) -> None:
    await desk.create("qwen", prefill={}, decode={})
    await desk.until_serving("qwen", prefill=1, decode=1)
    await desk.cluster.delete(NAMESPACES, "", desk.namespace)
    await desk.eventually(
        lambda: desk.cluster.get(NAMESPACES, "", desk.namespace), lambda found: found is None, what="the namespace goes"
    )


async def test_a_spec_that_cannot_be_is_refused_with_the_next_step_and_what_runs_goes_on(desk: Desk) -> None:
    await desk.create("qwen", decode={})
    await desk.until_serving("qwen", decode=1)
    before = await desk.pod_uids("qwen")
    await desk.edit("qwen", decode={"podTemplate": {"spec": {"hostNetwork": True}}})
    refused = await desk.until("qwen", "RolloutComplete", "False", "SpecRefused", says="hostNetwork")
    assert is_so(refused, "Ready")
    assert refused["status"]["phase"] == "Refused"
    await desk.until_event("qwen", "SpecRefused")
    assert await desk.pod_uids("qwen") == before
    await desk.edit("qwen", decode={"podTemplate": None})
    await desk.until_serving("qwen", decode=1)
    assert await desk.pod_uids("qwen") == before


async def test_a_model_that_was_never_good_starts_nothing(desk: Desk) -> None:
    await desk.create("qwen", engine={"name": "vllm"})
    await desk.until("qwen", "Ready", "False", "SpecRefused", says="vllm")
    assert await desk.all(STATEFULSETS) == []
    assert await desk.all(POOLS) == []
    await desk.edit("qwen", engine={"name": "torch"})
    await desk.until_serving("qwen", decode=1)


@pytest.mark.parametrize("field", ["source", "rollout"])
async def test_what_the_schema_refuses_never_reaches_the_operator(desk: Desk, field: str) -> None:
    wrong = {"source": {"uri": "ftp://somewhere"}, "rollout": {"surge": 0, "maxUnavailable": 0}}[field]
    with pytest.raises(Refused, match=r"write hf://|must not both be 0") as refusal:
        await desk.create("qwen", **{field: wrong})
    assert refusal.value.status == 422
