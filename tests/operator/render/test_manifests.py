"""What holds for every object of every Model: API servers take it, it is found and collected, nothing is privileged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from antiphon_operator.names import MAX_MODEL_NAME

from tests.support.manifests import assert_valid, pod_templates_of, schema_problems, security_problems
from tests.support.rendered import SPECS, render

SAMPLES = sorted(Path("deploy/samples").rglob("*.yaml"))


def sample_specs() -> dict[str, dict[str, Any]]:
    return {
        f"{path.name}:{document['metadata']['name']}": document["spec"]
        for path in SAMPLES
        for document in yaml.safe_load_all(path.read_text())
        if document and document["kind"] == "Model"
    }


ALL = {**SPECS, **sample_specs()}


@pytest.mark.parametrize("spec", ALL.values(), ids=ALL.keys())
def test_the_oldest_and_the_newest_api_server_take_every_object(spec: dict[str, Any]) -> None:
    assert_valid(render(spec).manifests)


def test_the_check_would_find_a_wrong_object() -> None:
    manifest = render(SPECS["demo"]).of_kind("StatefulSet")[0]
    manifest["spec"]["template"]["spec"]["containers"][0]["imge"] = "typo"
    assert len(schema_problems(manifest)) == 2


@pytest.mark.parametrize("spec", ALL.values(), ids=ALL.keys())
def test_no_pod_has_more_than_the_restricted_standard_allows_but_the_rdma_profiles_lock(spec: dict[str, Any]) -> None:
    rendered = render(spec)
    rdma = rendered.model.spec.kv_cache.transfer.rdma.resource not in ("", "none")
    templates = [template for manifest in rendered.manifests for template in pod_templates_of(manifest)]
    assert templates
    for template in templates:
        pod = template["spec"]
        side = [container for container in pod["containers"] if container["name"] not in ("worker", "fetch")]
        pod["containers"] = [container for container in pod["containers"] if container not in side]  # a person's own
        assert security_problems(template, may_add=frozenset({"IPC_LOCK"} if rdma else ())) == []


def test_the_linter_finds_what_it_is_for() -> None:
    template = render(SPECS["demo"]).pod()
    template["spec"]["automountServiceAccountToken"] = True
    template["spec"]["volumes"] += [{"name": "host", "hostPath": {"path": "/"}}, {"name": "big", "emptyDir": {}}]
    template["spec"]["containers"][0]["securityContext"] = {"privileged": True, "capabilities": {"add": ["SYS_ADMIN"]}}
    found = security_problems(template)
    for word in ("token", "path of the node", "no size", "privileged", "writable", "SYS_ADMIN"):
        assert any(word in problem for problem in found), word


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_every_object_is_owned_by_the_model_and_never_holds_up_its_deletion(spec: dict[str, Any]) -> None:
    for manifest in render(spec).manifests:
        metadata = manifest["metadata"]
        assert metadata["namespace"] == "chat"
        assert metadata["labels"]["antiphon.dev/model"] == "tiny"
        assert metadata["ownerReferences"] == [
            {
                "apiVersion": "antiphon.dev/v1alpha1",
                "kind": "Model",
                "name": "tiny",
                "uid": "uid-1",
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ]


def test_the_longest_name_still_makes_names_and_labels_that_fit() -> None:
    name = "m" * MAX_MODEL_NAME
    for spec in (SPECS["ephemeral"], SPECS["gang"]):
        for manifest in render(spec, name=name).manifests:
            metadata = manifest["metadata"]
            longest = 63 - len("-00000") if manifest["kind"] == "Job" else 63
            longest = 52 if manifest["kind"] == "StatefulSet" else longest
            assert re.fullmatch(rf"[a-z0-9][-a-z0-9.]{{0,{longest - 1}}}", metadata["name"]), metadata["name"]
            assert all(len(value) <= 63 for value in metadata["labels"].values())


def test_a_workers_service_account_has_no_token_and_may_be_replaced() -> None:
    assert render(SPECS["demo"]).pod()["spec"]["serviceAccountName"] == "tiny-worker"
    assert render(SPECS["claim"]).pod()["spec"]["serviceAccountName"] == "models"
    assert render(SPECS["claim"]).of_kind("Job")[0]["spec"]["template"]["spec"]["serviceAccountName"] == "models"
    assert render(SPECS["demo"]).of_kind("ServiceAccount")[0]["automountServiceAccountToken"] is False
