"""`podTemplate` laid over the rendered pods."""

from __future__ import annotations

import copy
from typing import Any

from antiphon_operator.render.merge import merge_pod_template

from tests.support.rendered import SPECS, render


def with_template(**spec: Any) -> dict[str, Any]:
    return render({"source": {"uri": "demo"}, "decode": {"podTemplate": {"spec": spec}}}).pod()["spec"]


def test_an_empty_template_changes_nothing() -> None:
    rendered = render(SPECS["demo"]).pod()
    assert merge_pod_template(rendered, {}) == rendered
    assert merge_pod_template(rendered, {"metadata": None, "spec": None}) == rendered


def test_neither_side_is_changed() -> None:
    rendered, given = render(SPECS["demo"]).pod(), SPECS["template"]["decode"]["podTemplate"]
    before = copy.deepcopy((rendered, given))
    merge_pod_template(rendered, given)
    assert (rendered, given) == before


def test_variables_and_volumes_are_merged_by_name_and_mounts_by_path() -> None:
    plain = render(SPECS["demo"]).worker()
    spec = with_template(
        volumes=[{"name": "shm", "emptyDir": {"sizeLimit": "9Gi"}}, {"name": "data", "emptyDir": {"sizeLimit": "1Gi"}}],
        containers=[
            {
                "name": "worker",
                "env": [{"name": "HOME", "value": "/data"}, {"name": "X", "value": "$(POD_IP)"}],
                "volumeMounts": [{"name": "data", "mountPath": "/tmp"}, {"name": "data", "mountPath": "/data"}],
            }
        ],
    )
    worker = spec["containers"][0]
    assert [one["name"] for one in spec["volumes"]] == ["shm", "tmp", "redis", "data"]
    assert spec["volumes"][0]["emptyDir"] == {"sizeLimit": "9Gi"}
    assert [one["name"] for one in worker["env"]] == [*(one["name"] for one in plain["env"]), "X"]
    assert {"name": "HOME", "value": "/data"} in worker["env"]
    assert {mount["mountPath"]: mount["name"] for mount in worker["volumeMounts"]} == {
        "/dev/shm": "shm",
        "/tmp": "data",
        "/etc/antiphon/redis": "redis",
        "/data": "data",
    }
    assert worker["image"] == plain["image"]


def test_further_containers_come_after_ours() -> None:
    spec = with_template(
        containers=[{"name": "logs", "image": "logs:1"}], initContainers=[{"name": "prepare", "image": "sh:1"}]
    )
    assert [one["name"] for one in spec["containers"]] == ["worker", "logs"]
    assert [one["name"] for one in spec["initContainers"]] == ["prepare"]


def test_any_other_field_replaces_the_rendered_one_whole() -> None:
    spec = with_template(securityContext={"runAsUser": 7}, schedulerName="volcano", runtimeClassName="nvidia")
    assert spec["securityContext"] == {"runAsUser": 7}
    assert (spec["schedulerName"], spec["runtimeClassName"]) == ("volcano", "nvidia")


def test_given_tolerations_leave_those_for_lost_nodes_unless_they_speak_of_them() -> None:
    key = "node.kubernetes.io/unreachable"
    gpu = {"key": "gpu", "operator": "Exists"}
    own = {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
    assert [one["key"] for one in with_template(tolerations=[gpu])["tolerations"]] == [
        "gpu",
        "node.kubernetes.io/not-ready",
        key,
    ]
    found = with_template(tolerations=[own])["tolerations"]
    assert [one["tolerationSeconds"] for one in found if one["key"] == key] == [5]


def test_labels_of_ours_stay_and_a_queues_name_reaches_the_set_too() -> None:
    labels = {"kueue.x-k8s.io/queue-name": "gpus", "antiphon.dev/model": "other", "team": "chat"}
    rendered = render({"source": {"uri": "demo"}, "decode": {"podTemplate": {"metadata": {"labels": labels}}}})
    pod, own = rendered.pod()["metadata"]["labels"], rendered.of_kind("StatefulSet")[0]["metadata"]["labels"]
    assert (pod["antiphon.dev/model"], pod["team"], pod["kueue.x-k8s.io/queue-name"]) == ("tiny", "chat", "gpus")
    assert own["kueue.x-k8s.io/queue-name"] == "gpus"
    assert "team" not in own
