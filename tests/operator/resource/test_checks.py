"""What the operator itself refuses: each sentence names the field to write instead."""

from __future__ import annotations

from typing import Any

import pytest
from antiphon_operator.options import OperatorContext
from antiphon_operator.render.templates import pod_template
from antiphon_operator.render.weights import Weights
from antiphon_operator.resource.checks import check
from antiphon_operator.resource.parse import parse_model
from antiphon_operator.resource.pod_template import MAX_BYTES, OWNED_INIT_CONTAINERS, OWNED_PATHS, OWNED_VOLUMES
from antiphon_operator.resource.reasons import Reason
from antiphon_operator.resource.worker_flags import OWNED_FLAGS, OWNED_VARIABLES, instead_of_flag
from antiphon_worker.options import WorkerOptions

from tests.support import crds

HUB = {"source": {"uri": "hf://org/model"}}
REPLACEABLE_VOLUMES = {"shm", "tmp"}


def decode(pod_spec: dict[str, Any]) -> dict[str, Any]:
    return {**HUB, "decode": {"podTemplate": {"spec": pod_spec}}}


def worker(fields: dict[str, Any]) -> dict[str, Any]:
    return decode({"containers": [{"name": "worker", **fields}]})


def said(spec: dict[str, Any]) -> list[str]:
    problems = check(parse_model(crds.model(spec)))
    assert all(problem.reason is Reason.SPEC_REFUSED for problem in problems)
    return [str(problem) for problem in problems]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**HUB, "engine": {"name": "vllm"}}, "spec.engine.name: this version has no vllm engine: write torch"),
    (
        {**HUB, "engine": {"name": "timed"}, "prefill": {"parallelism": {"tensor": 2}}},
        "spec.prefill.parallelism: the timed engine computes nothing that ranks share: remove it",
    ),
    (
        {**HUB, "engine": {"args": ["--threads=2", "--dtype", "float32"]}},
        "spec.engine.args[1]: --dtype may not be given here: write spec.engine.dtype",
    ),
    ({**HUB, "engine": {"args": ["--transport=tcp"]}}, "write spec.kvCache.transfer.transport"),
    ({**HUB, "engine": {"args": ["--no-log-json"]}}, "--no-log-json may not be given here: the operator sets it"),
    ({**HUB, "engine": {"args": ["--tensor-parallel=2"]}}, "write parallelism.tensor of the pool"),
    ({**HUB, "kvCache": {"tiers": [{"type": "host", "size": "64Gi"}]}}, "keep KV blocks on the device only: remove"),
    (
        {**HUB, "decode": {"parallelism": {"tensor": 4}}, "autoscaling": {"decode": {"min": 3}, "gpuBudget": 8}},
        "spec.autoscaling.gpuBudget: the fewest replicas of the pools need 12 devices already",
    ),
    (
        {**HUB, "decode": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
        "resources.limits.nvidia.com/gpu: remove nvidia.com/gpu: it follows from parallelism and gpusPerPod",
    ),
    (
        {
            **HUB,
            "kvCache": {"transfer": {"rdma": {"resource": "rdma/hca"}}},
            "decode": {"resources": {"requests": {"rdma/hca": 1}}},
        },
        "remove rdma/hca: it follows from spec.kvCache.transfer.rdma",
    ),
    (
        {**HUB, "decode": {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1500M"}}}},
        "spec.decode.resources.requests.memory: 2Gi is more than its limit of 1500M",
    ),
    (
        {**HUB, "decode": {"resources": {"requests": {"example.com/x": 1}, "limits": {"example.com/x": 2}}}},
        "example.com/x cannot be shared: request and limit must be equal",
    ),
    ({**HUB, "prefill": {"podTemplate": {"replicas": 3}}}, "spec.prefill.podTemplate.replicas: a pod template has"),
    ({**HUB, "decode": {"podTemplate": {"metadata": {"name": "x"}}}}, "only labels and annotations of pods are yours"),
    ({**HUB, "decode": {"podTemplate": {"metadata": "x"}}}, "write an object with labels and annotations"),
    ({**HUB, "decode": {"podTemplate": {"metadata": {"labels": {"a": 1}}}}}, "quote numbers and true or false"),
    (
        {**HUB, "decode": {"podTemplate": {"metadata": {"labels": {"antiphon.dev/role": "prefill"}}}}},
        "antiphon.dev/role is set by the operator: remove it",
    ),
    (
        {**HUB, "decode": {"podTemplate": {"metadata": {"labels": {"app.kubernetes.io/name": "mine"}}}}},
        "app.kubernetes.io/name is set by the operator",
    ),
    (
        {
            **HUB,
            "kvCache": {"transfer": {"rdma": {"resource": "rdma/hca", "networks": ["fast"]}}},
            "decode": {"podTemplate": {"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "other"}}}},
        },
        "spec.kvCache.transfer.rdma.networks says it already",
    ),
    ({**HUB, "decode": {"podTemplate": {"spec": []}}}, "write an object, the spec of a pod"),
    (decode({"serviceAccountName": "me"}), "write spec.serviceAccountName instead"),
    (decode({"imagePullSecrets": [{"name": "x"}]}), "write spec.imagePullSecrets instead"),
    (decode({"nodeName": "node-1"}), "write nodeSelector or affinity"),
    (decode({"hostNetwork": True}), "two pods on one node would want the same ports"),
    (decode({"restartPolicy": "Never"}), "restartPolicy may not be set here: remove it, the operator decides it"),
    (
        {**decode({"affinity": {}}), "placement": {"sameTopology": "example.com/rack"}},
        "it would replace what spec.placement.sameTopology makes",
    ),
    (
        worker({"image": "mine:1"}),
        "spec.decode.podTemplate.spec.containers[0].image: image may not be set here: write ",
    ),
    (worker({"command": ["sh"]}), "command may not be set here"),
    (worker({"args": []}), "write spec.engine.args instead"),
    (worker({"ports": []}), "ports may not be set here"),
    (worker({"readinessProbe": {}}), "readinessProbe may not be set here"),
    (worker({"resources": {}}), "write resources of the pool instead"),
    (worker({"env": [{"name": "POD_IP", "value": "1.2.3.4"}]}), "POD_IP may not be set here: the operator sets it"),
    (
        worker({"env": [{"name": "ANTIPHON_DTYPE", "value": "x"}]}),
        "ANTIPHON_DTYPE may not be set here: write spec.engine",
    ),
    (worker({"env": [{"name": "A"}, {"name": "A"}]}), "env[1]: A is there twice: remove one"),
    (worker({"env": {"A": "b"}}), "write a list of objects with a name each"),
    (worker({"volumeMounts": [{"name": "v", "mountPath": "/etc/antiphon/redis"}]}), "is where the operator mounts"),
    (worker({"volumeMounts": [{"name": "v", "mountPath": "/a"}] * 2}), "/a is there twice: remove one"),
    (worker({"volumeMounts": [{"name": "v"}]}), "write name (of a volume) and mountPath"),
    (worker({"volumeMounts": "v"}), "write a list of objects with name and mountPath"),
    (decode({"containers": [{"image": "x"}]}), "write a name: lists are merged by it"),
    (decode({"containers": [{"name": "engine"}]}), "engine needs an image; the worker's container is called worker"),
    (
        decode({"containers": [{"name": "side", "image": "x", "ports": [{"containerPort": 9001}]}]}),
        "port 9001 is the worker's",
    ),
    (decode({"initContainers": [{"name": "fetch", "image": "x"}]}), "fetch is the operator's container"),
    (decode({"initContainers": [{"name": "prepare"}]}), "prepare needs an image"),
    (decode({"volumes": [{"name": "redis", "emptyDir": {}}]}), "redis is the operator's volume"),
    (decode({"volumes": [{"name": "scratch"}]}), "scratch needs a source, such as emptyDir: {}"),
    (decode({"annotations": "x" * MAX_BYTES}), "move files into a ConfigMap"),
]


@pytest.mark.parametrize(("spec", "sentence"), REFUSED, ids=[sentence[-40:] for _, sentence in REFUSED])
def test_what_a_typed_field_says_or_the_operator_lives_by_is_refused(spec: dict[str, Any], sentence: str) -> None:
    assert crds.refusals("models", crds.model(spec)) == [], "the API server accepts it, so the operator has to say it"
    assert any(sentence in one for one in said(spec)), said(spec)


def test_all_problems_are_said_at_once() -> None:
    spec = {**HUB, "prefill": {}, **worker({"image": "x", "command": ["y"]}), "engine": {"args": ["--host=x"]}}
    assert len(said(spec)) == 3


@pytest.mark.parametrize(
    "spec",
    [
        HUB,
        decode({"tolerations": [{"operator": "Exists"}], "nodeSelector": {"a": "b"}, "schedulerName": "volcano"}),
        decode({"affinity": {"nodeAffinity": {}}}),
        worker({"env": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "ANTIPHON_THREADS", "value": "4"}]}),
        worker({"volumeMounts": [{"name": "x", "mountPath": "/modelszoo"}]}),
        decode({"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}}]}),
        {**HUB, "engine": {"args": ["--kv-memory-gb", "40", "--max-batch-tokens=1024"]}},
        {**HUB, "accelerator": {"resource": "none"}, "autoscaling": {"gpuBudget": 1, "decode": {"min": 8}}},
        {**HUB, "decode": {"resources": {"requests": {"memory": "1024Mi"}, "limits": {"memory": "1Gi"}}}},
    ],
)
def test_everything_else_is_a_persons_own(spec: dict[str, Any]) -> None:
    assert said(spec) == []


# -- what is refused here is what is rendered there


@pytest.fixture
def rendered() -> dict[str, Any]:
    spec = {
        **HUB,
        "prefill": {"parallelism": {"tensor": 2, "pipeline": 2, "expert": 2}, "gpusPerPod": 2},
        "maxContextTokens": 1024,
        "caBundle": {"name": "ca"},
    }
    model = parse_model(crds.model(spec))
    context = OperatorContext(
        version="1", worker_image="worker:1", worker_redis_url="redis://r:6379/0", endpoint="http://gateway"
    )
    weights = Weights(revision="0123abc", size_bytes=1, path="/models/org/model")
    template: dict[str, Any] = pod_template(model, model.pools[0], "abcdef", context, weights)
    return template["spec"]


def test_every_rendered_volume_is_protected_or_may_be_replaced(rendered: dict[str, Any]) -> None:
    assert {volume["name"] for volume in rendered["volumes"]} == OWNED_VOLUMES | REPLACEABLE_VOLUMES
    assert {container["name"] for container in rendered["initContainers"]} == OWNED_INIT_CONTAINERS
    paths = {mount["mountPath"] for mount in rendered["containers"][0]["volumeMounts"]} - {"/dev/shm", "/tmp"}
    assert all(path.startswith(OWNED_PATHS) for path in paths)


def test_every_rendered_option_is_protected(rendered: dict[str, Any]) -> None:
    given = [argument for argument in rendered["containers"][0]["args"] if argument.startswith("--")]
    assert all(instead_of_flag(argument) for argument in given), given


def test_every_variable_that_a_rendered_command_refers_to_is_protected(rendered: dict[str, Any]) -> None:
    container = rendered["containers"][0]
    command = " ".join([*container["command"], *container["args"]])
    used = {entry["name"] for entry in container["env"] if f"${entry['name']}" in command.replace("(", "")}
    assert used
    assert used <= OWNED_VARIABLES


def test_every_protected_option_is_one_of_the_workers_or_of_its_gang() -> None:
    known = {name.replace("_", "-") for name in WorkerOptions.__dataclass_fields__}
    assert set(OWNED_FLAGS) - known <= {
        "revision", "redis-username", "redis-password-file", "list-model", "tensor-parallel", "pipeline-parallel",
        "expert-parallel", "ray-head", "ray-join",
    }  # fmt: skip
