"""Wrong Models are refused with a sentence that says what to change; by the API server and by the operator alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from antiphon_operator.resource.parse import parse_model
from antiphon_operator.resource.problems import ResourceError
from antiphon_operator.resource.reference import all_rules

from tests.support import crds

HUB = {"source": {"uri": "hf://org/model"}}
PAIR = {**HUB, "prefill": {}}

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("uri of no kind", {"source": {"uri": "s3://bucket/model"}}, "write hf://organisation/name, hf://organisation"),
    ("folder of a hub name", {"source": {"uri": "hf://org/model/folder"}}, "hf://organisation/name/file.gguf"),
    ("hub name without organisation", {"source": {"uri": "hf://model"}}, "write hf://organisation/name"),
    ("path out of a claim", {"source": {"uri": "pvc://weights/a/../../etc"}}, "write it without '..'"),
    ("bad revision", {"source": {"uri": "hf://org/model", "revision": "ma in"}}, "write a branch, a tag or a commit"),
    ("revision of a claim", {"source": {"uri": "pvc://weights", "revision": "main"}}, "remove revision"),
    ("revision of demo", {"source": {"uri": "demo", "revision": "main"}}, "remove revision"),
    ("secret of a claim", {"source": {"uri": "pvc://weights", "secretRef": {"name": "token"}}}, "remove secretRef"),
    ("bad secret", {"source": {"uri": "hf://o/m", "secretRef": {"name": "My Token"}}}, "write the name of an object"),
    (
        "cached claim",
        {"source": {"uri": "pvc://weights", "cache": {"type": "Claim", "claimName": "other"}}},
        "remove cache (a pvc:// source is read where it lies)",
    ),
    ("claim without name", {"source": {"uri": "hf://o/m", "cache": {"type": "Claim"}}}, "type Claim needs claimName"),
    ("name without claim", {"source": {"uri": "hf://o/m", "cache": {"claimName": "c"}}}, "set type: Claim, or remove"),
    (
        "size of a claim",
        {"source": {"uri": "hf://o/m", "cache": {"type": "Claim", "claimName": "c", "size": "80Gi"}}},
        "remove size, the claim has a size of its own",
    ),
    (
        "bad claim",
        {"source": {"uri": "hf://o/m", "cache": {"type": "Claim", "claimName": "C_"}}},
        "write the name of an",
    ),
    (
        "bad size",
        {"source": {"uri": "hf://o/m", "cache": {"size": "80 GB"}}},
        "write a Kubernetes quantity such as 64Gi",
    ),
    ("bad name", {**HUB, "names": ["-qwen"]}, "write a name of letters, digits and . _ : / -"),
    ("a name twice", {**HUB, "names": ["qwen", "qwen"]}, "names must differ from each other"),
    (
        "bad accelerator",
        {**HUB, "accelerator": {"resource": "gpu"}},
        "an extended resource such as nvidia.com/gpu, or none",
    ),
    (
        "gang that is not even",
        {**HUB, "decode": {"parallelism": {"tensor": 4}, "gpusPerPod": 3}},
        "gpusPerPod must divide",
    ),
    (
        "gang that is not even",
        {**HUB, "prefill": {"parallelism": {"tensor": 2, "pipeline": 2}, "gpusPerPod": 8}},
        "gpusPerPod must divide parallelism.tensor x parallelism.pipeline",
    ),
    ("experts", {**HUB, "decode": {"parallelism": {"tensor": 4, "expert": 3}}}, "expert must divide tensor x pipeline"),
    (
        "experts",
        {**HUB, "prefill": {"parallelism": {"tensor": 2, "expert": 4}}},
        "expert must divide tensor x pipeline",
    ),
    (
        "experts over some of a stage",
        {**HUB, "decode": {"parallelism": {"tensor": 4, "expert": 2}}},
        "set parallelism.expert of the pool to its tensor, or to 1",
    ),
    (
        "experts over several stages",
        {**HUB, "prefill": {"parallelism": {"tensor": 2, "pipeline": 2, "expert": 4}}},
        "engine torch spreads experts over all ranks of a stage or over none",
    ),
    ("bad topology", {**HUB, "placement": {"sameTopology": "a b"}}, "write the key of a node label"),
    ("required RDMA, no device", {**HUB, "kvCache": {"transfer": {"require": "rdma"}}}, "rdma needs rdma.resource"),
    (
        "RDMA by TCP",
        {**HUB, "kvCache": {"transfer": {"require": "rdma", "transport": "tcp", "rdma": {"resource": "rdma/hca"}}}},
        "transport: tcp has no RDMA",
    ),
    (
        "networks alone",
        {**HUB, "kvCache": {"transfer": {"rdma": {"networks": ["fast"]}}}},
        "set rdma.resource, or remove",
    ),
    (
        "bad RDMA device",
        {**HUB, "kvCache": {"transfer": {"rdma": {"resource": "hca"}}}},
        "extended resource of an RDMA",
    ),
    (
        "bad network",
        {**HUB, "kvCache": {"transfer": {"rdma": {"resource": "rdma/hca", "networks": ["Fast Net"]}}}},
        "write a network attachment as name or namespace/name",
    ),
    ("bad tier", {**HUB, "kvCache": {"tiers": [{"type": "host", "size": "many"}]}}, "write a Kubernetes quantity"),
    ("bad duration", {**HUB, "sla": {"ttft": {"p95": "half a second"}}}, "write a time such as 500ms"),
    ("bad duration", {**HUB, "sla": {"tpot": {"p95": "40"}}}, "write a time such as 500ms"),
    ("promise of nothing", {**HUB, "sla": {"ttft": {"p95": "0s"}}}, "p95 must be from 1ms to 1h"),
    ("promise of nothing", {**HUB, "sla": {"tpot": {"p95": "0ms"}}}, "p95 must be from 1ms to 1h"),
    (
        "growing promise of nothing",
        {**HUB, "sla": {"ttft": {"p95": "1s", "perThousandTokens": "0s"}}},
        "perThousandTokens must be from 1ms to 1h",
    ),
    (
        "growing promise without a base",
        {**HUB, "sla": {"ttft": {"perThousandTokens": "60ms"}}},
        "write ttft.p95 too",
    ),
    ("bounds", {**PAIR, "autoscaling": {"prefill": {"min": 9}}}, "min must not be above max"),
    ("bounds", {**HUB, "autoscaling": {"decode": {"min": 5, "max": 4}}}, "min must not be above max"),
    (
        "bounds of no pool",
        {**HUB, "autoscaling": {"prefill": {"min": 2}}},
        "autoscaling.prefill goes with a prefill pool",
    ),
    ("no step possible", {**HUB, "rollout": {"surge": 0}}, "surge and maxUnavailable must not both be 0"),
    ("no patience", {**HUB, "rollout": {"progressDeadline": "1s"}}, "progressDeadline must be from 10s to 24h"),
    ("bad deadline", {**HUB, "rollout": {"progressDeadline": "soon"}}, "write a time such as 500ms"),
    ("endless drain", {**HUB, "rollout": {"drainTimeout": "48h"}}, "drainTimeout must be from 0s to 24h"),
    ("bad drain", {**HUB, "rollout": {"drainTimeout": "10 m"}}, "write a time such as 500ms"),
    ("bad pull secret", {**HUB, "imagePullSecrets": [{"name": "Registry!"}]}, "write the name of an object"),
    ("bad account", {**HUB, "serviceAccountName": "Me"}, "write the name of an object"),
    ("bad bundle", {**HUB, "caBundle": {"name": "CA"}}, "write the name of an object"),
]

MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("no source", {"decode": {}}, "'source' is a required property"),
    ("unknown field", {**HUB, "replicas": 2}, "replicas: unknown field"),
    ("unknown field of a pool", {**HUB, "decode": {"gpus": 2}}, "spec.decode.gpus: unknown field"),
    ("unknown engine", {**HUB, "engine": {"name": "other"}}, "'other' is not one of"),
    ("mode that YAML reads as a boolean", {**HUB, "autoscaling": {"mode": False}}, "False is not one of"),
    ("replicas below zero", {**HUB, "decode": {"replicas": -1}}, "-1 is less than the minimum of 0"),
    ("too many replicas", {**HUB, "decode": {"replicas": 1001}}, "1001 is greater than the maximum of 1000"),
    ("too many names", {**HUB, "names": [f"n{i}" for i in range(17)]}, "is too long"),
    ("fractional cores as a number", {**HUB, "decode": {"resources": {"limits": {"cpu": 0.5}}}}, "0.5 is not valid"),
    ("amount that is none", {**HUB, "decode": {"resources": {"limits": {"memory": "lots"}}}}, "'lots' does not match"),
]

NAMES = {
    "a" * 56: "metadata.name must have at most 55 characters",
    "1st": "metadata.name must be lower-case letters",
    "qwen3.5": "metadata.name must be lower-case letters",
    "qwen-": "metadata.name must be lower-case letters",
}


def operator_says(model: dict[str, Any]) -> list[str]:
    try:
        parse_model(model)
    except ResourceError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize(("spec", "sentence"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_wrong_model_is_refused_with_a_sentence(spec: dict[str, Any], sentence: str) -> None:
    api_server, operator = crds.refusals("models", crds.model(spec)), operator_says(crds.model(spec))
    assert any(sentence in said for said in api_server), api_server
    assert any(sentence in said for said in operator), operator


@pytest.mark.parametrize(("spec", "fault"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
def test_a_malformed_model_is_refused_by_the_schema(spec: dict[str, Any], fault: str) -> None:
    said = crds.refusals("models", crds.model(spec))
    assert any(fault in one for one in said), said


@pytest.mark.parametrize(("name", "sentence"), NAMES.items())
def test_a_name_that_children_could_not_have_is_refused(name: str, sentence: str) -> None:
    model = crds.model(HUB, name)
    for said in (crds.refusals("models", model), operator_says(model)):
        assert any(sentence in one for one in said), said


def test_the_operator_and_the_api_server_find_the_same_broken_rules() -> None:
    right = [model["spec"] for model in crds.sample_models().values()]
    for spec in [*right, *(spec for _, spec, _ in WRONG)]:
        model = crds.model(spec)
        by_rules, by_operator = crds.refusals("models", model), operator_says(model)
        assert bool(by_rules) == bool(by_operator), (spec, by_rules, by_operator)
        assert set(by_operator) <= set(by_rules), spec


def test_each_rule_holds_in_one_case_and_fails_in_another() -> None:
    models = list(crds.sample_models().values()) + [crds.model(spec) for _, spec, _ in WRONG]
    models += [crds.model(HUB, name) for name in NAMES]
    broken = {refusal for model in models for refusal in crds.refusals("models", model)}
    sentences_broken = {refusal.partition(": ")[2] for refusal in broken}
    schema = crds.schema("models")
    assert {message for _, _, message in all_rules(schema)} == sentences_broken
    assert not crds.refusals("models", crds.sample_models()["every-field.yaml"])


def test_the_role_of_a_pool_never_changes() -> None:
    pool: dict[str, Any] = {
        "apiVersion": "antiphon.dev/v1alpha1",
        "kind": "Pool",
        "metadata": {"name": "p"},
        "spec": {"role": "decode"},
    }
    scaled, moved = copy.deepcopy(pool), copy.deepcopy(pool)
    scaled["spec"]["replicas"] = 3
    moved["spec"]["role"] = "prefill"
    assert crds.refusals("pools", pool) == []
    assert crds.refusals("pools", scaled, before=pool) == []
    assert crds.refusals("pools", moved, before=pool) == [
        "spec: role never changes: the operator makes a Pool for each role of its Model"
    ]


def test_an_object_that_is_no_model_is_refused() -> None:
    with pytest.raises(ResourceError, match=r"kind: write apiVersion: antiphon\.dev/v1alpha1 and kind: Model"):
        parse_model({"apiVersion": "v1", "kind": "Pod"})
    with pytest.raises(ResourceError, match=r"metadata\.name: write a name"):
        parse_model({**crds.model(HUB), "metadata": {}})
