"""What a change of a field does: only fields of the kind `new revision` name a revision."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

import pytest
from antiphon_operator.resource.changes import CHANGES, Change, leaves, pod_affecting
from antiphon_operator.resource.model import parse_spec

from tests.support import crds

BASE: dict[str, Any] = crds.sample_models()["every-field.yaml"]["spec"]

OTHER: dict[str, Any] = {
    "source.uri": "hf://org/other",
    "source.revision": "v2",
    "source.secretRef.name": "another",
    "source.secretRef.key": "another",
    "source.cache.type": "Claim",
    "source.cache.size": "100Gi",
    "source.cache.claimName": "another",
    "names": ["another"],
    "maxContextTokens": 1024,
    "engine.name": "timed",
    "engine.dtype": "float32",
    "engine.image": "another:1",
    "engine.args": ["--max-batch-tokens=64"],
    "accelerator.resource": "amd.com/gpu",
    "placement.sameTopology": "example.com/rack",
    "kvCache.blockTokens": 16,
    "kvCache.transfer.transport": "ucx",
    "kvCache.transfer.require": "rdma",
    "kvCache.transfer.rdma.resource": "rdma/other",
    "kvCache.transfer.rdma.count": 2,
    "kvCache.transfer.rdma.networks": ["another"],
    "kvCache.tiers": [{"type": "host", "size": "64Gi"}],
    "kvCache.isolation": "Shared",
    "sla.ttft.p95": "1s",
    "sla.ttft.perThousandTokens": "90ms",
    "sla.tpot.p95": "1s",
    "autoscaling.mode": "Enforce",
    "autoscaling.prefill.min": 2,
    "autoscaling.prefill.max": 9,
    "autoscaling.decode.min": 2,
    "autoscaling.decode.max": 9,
    "autoscaling.gpuBudget": 80,
    "rollout.surge": 2,
    "rollout.maxUnavailable": 1,
    "rollout.progressDeadline": "20m",
    "rollout.drainTimeout": "20m",
    "rollout.paused": True,
    "imagePullSecrets": [{"name": "another"}],
    "serviceAccountName": "another",
    "caBundle.name": "another",
    "caBundle.key": "another",
    "proxy.httpProxy": "http://another:1",
    "proxy.httpsProxy": "http://another:1",
    "proxy.noProxy": ".another",
    **{
        f"{pool}.{path}": value
        for pool in ("prefill", "decode")
        for path, value in {
            "replicas": 7,
            "parallelism.tensor": 8,
            "parallelism.pipeline": 2,
            "parallelism.expert": 2,
            "gpusPerPod": 1,
            "resources.requests": {"cpu": 9},
            "resources.limits": {"memory": "97Gi"},
            "podTemplate": {"spec": {"schedulerName": "another"}},
        }.items()
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    spec = copy.deepcopy(BASE)
    *parents, last = path.split(".")
    at = spec
    for key in parents:
        at = at.setdefault(key, {})
    at[last] = value
    return spec


def affecting(spec: dict[str, Any]) -> dict[str, Any]:
    return pod_affecting(parse_spec(spec))


def test_every_field_says_what_a_change_of_it_does() -> None:
    assert [leaf.path for leaf in leaves()] == list(CHANGES)
    assert set(OTHER) == set(CHANGES)


@pytest.mark.parametrize("path", CHANGES)
def test_a_revision_changes_with_the_fields_that_pods_are_made_of_and_no_others(path: str) -> None:
    makes_a_revision = CHANGES[path].change is Change.NEW_REVISION
    assert (affecting(changed(path, OTHER[path])) != affecting(BASE)) == makes_a_revision


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({}, {"engine": {"name": "torch", "dtype": "bfloat16"}, "kvCache": {"blockTokens": 64}}),
        ({}, {"accelerator": {"resource": "nvidia.com/gpu"}, "decode": {"gpusPerPod": 1}}),
        ({"decode": {"parallelism": {"tensor": 4}}}, {"decode": {"parallelism": {"tensor": 4}, "gpusPerPod": 4}}),
        ({"decode": {"resources": {"limits": {"cpu": 4}}}}, {"decode": {"resources": {"limits": {"cpu": "4000m"}}}}),
        (
            {"decode": {"resources": {"limits": {"memory": "1Gi"}}}},
            {"decode": {"resources": {"limits": {"memory": "1024Mi"}}}},
        ),
        ({}, {"kvCache": {"transfer": {"rdma": {"resource": "none", "count": 3}}}}),
    ],
)
def test_writing_the_same_in_other_words_changes_no_pod(less: dict[str, Any], more: dict[str, Any]) -> None:
    source = {"source": {"uri": "hf://org/model"}}
    assert affecting(source | less) == affecting(source | more)


@pytest.mark.parametrize("source", [{"uri": "demo"}, {"uri": "pvc://weights"}])
def test_what_only_downloads_need_changes_no_pod_where_none_downloads(source: dict[str, Any]) -> None:
    told = {"proxy": {"httpProxy": "http://proxy:1"}, "caBundle": {"name": "ca"}}
    assert affecting({"source": source, **told}) == affecting({"source": source})


def test_adding_a_prefill_pool_makes_a_revision() -> None:
    source = {"source": {"uri": "demo"}}
    assert affecting({**source, "prefill": {}}) != affecting(source)


def test_it_is_plain_json_and_leaves_the_spec_alone() -> None:
    found = affecting(BASE)
    assert json.loads(json.dumps(found)) == found


def test_the_same_spec_has_the_same_part_in_every_version() -> None:
    """What changes here restarts every pod of every user at the next upgrade of the operator."""
    assert affecting({"source": {"uri": "demo"}, "prefill": {"replicas": 2}}) == {
        "source": {"uri": "demo"},
        "prefill": {},
        "decode": {},
    }
    everything: dict[str, Any] = {}
    for path, value in {**OTHER, "engine.name": "torch", "source.cache.type": "Ephemeral"}.items():
        *parents, last = path.split(".")
        at = everything
        for key in parents:
            at = at.setdefault(key, {})
        at[last] = value
    told = json.dumps(affecting(everything), sort_keys=True)
    assert hashlib.sha256(told.encode()).hexdigest()[:8] == "7e3f2e45", told
