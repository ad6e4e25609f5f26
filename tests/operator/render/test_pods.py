"""What a worker pod is made of."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from antiphon.configuration import add_arguments, load, specs
from antiphon_engine.gang import environment as environment_of_ray
from antiphon_operator import names
from antiphon_operator.options import OperatorContext
from antiphon_operator.render.command import DRAIN_TIMEOUT_S, TERMINATION_GRACE_S
from antiphon_worker.options import WorkerOptions

from tests.support.rendered import COMMIT, CONTEXT, REPLICA, SPECS, render


def worker_options(arguments: list[str]) -> WorkerOptions:
    """As a worker in a pod with this name and address would read them."""
    told = [text.replace("$(POD_NAME)", "tiny-0").replace("$(POD_IP)", "10.1.2.3") for text in arguments]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser, specs(WorkerOptions), positional=("model",))
    return load(WorkerOptions, parser.parse_args(told), {})


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in container["env"]}


def volumes(template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {volume["name"]: volume for volume in template["spec"]["volumes"]}


def mounts(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {mount["mountPath"]: mount for mount in container["volumeMounts"]}


@pytest.mark.parametrize("name", SPECS)
def test_a_worker_understands_its_arguments(name: str) -> None:
    rendered = render(SPECS[name])
    for pool in rendered.model.pools:
        worker = rendered.worker(pool.role)
        assert (worker["command"] == ["antiphon", "worker"]) is (pool.pods == 1)
        options = worker_options(worker["args"])
        assert options.name == "chat/tiny"
        assert options.role == ("both" if rendered.model.aggregated else pool.role)
        assert options.worker_id == "tiny-0"
        assert (options.host, options.advertise_host) == ("10.1.2.3", "10.1.2.3")
        assert (options.port, options.status_port) == (9000, 9001)
        assert options.revision == rendered.data.revision
        assert options.redis_password_file == "/etc/antiphon/redis/password"
        assert options.redis_username.startswith("antiphon-")
        assert options.list_model is False
        assert options.max_context_tokens == (rendered.model.spec.max_context_tokens or 0)
        asked = pool.spec.parallelism
        given = (options.tensor_parallel, options.pipeline_parallel, options.expert_parallel)
        assert given == (asked.tensor, asked.pipeline, asked.expert)
        assert options.ray_node_ranks == (pool.gpus_per_pod if pool.pods > 1 else 0)


def test_the_model_is_a_folder_that_is_mounted_or_the_images_own() -> None:
    assert worker_options(render(SPECS["demo"]).worker()["args"]).model == "demo"
    assert worker_options(render(SPECS["timed"]).worker()["args"]).model == "demo"
    for name in ("ephemeral", "claim", "own-claim", "whole-claim"):
        worker = render(SPECS[name]).worker()
        model = worker_options(worker["args"]).model
        assert any(model == path or model.startswith(f"{path}/") for path in mounts(worker)), name


def test_engine_arguments_come_last() -> None:
    spec = {"source": {"uri": "demo"}, "engine": {"args": ["--max-batch-tokens=64", "--kv-memory-gb", "2"]}}
    options = worker_options(render(spec).worker()["args"])
    assert (options.max_batch_tokens, options.kv_memory_gb) == (64, 2.0)


def test_without_the_operators_redis_a_worker_gets_no_user_and_no_secret() -> None:
    context = OperatorContext("0.1.0", "worker:1", "redis://redis:6379", "", redis_configured=False)
    rendered = render(SPECS["demo"], context=context)
    assert "--redis-username" not in rendered.worker()["args"]
    assert "redis" not in volumes(rendered.pod())


@pytest.mark.parametrize(
    ("index", "flag"),
    [("0", "--ray-head"), ("1", f"--ray-join tiny-decode-REV-{REPLICA}-0.tiny-workers.chat.svc:6380")],
)
def test_the_first_pod_of_a_gang_works_and_the_others_join_it(index: str, flag: str, tmp_path: Path) -> None:
    rendered = render(SPECS["gang"])
    worker = rendered.worker()
    told = environment(worker)
    assert told["POD_INDEX"] == {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    assert told["REPLICA"] == {"fieldRef": {"fieldPath": "metadata.labels['antiphon.dev/replica']"}}
    antiphon = tmp_path / "antiphon"
    antiphon.write_text('#!/bin/sh\necho antiphon "$@"\n')
    antiphon.chmod(0o755)
    answer = subprocess.run(
        [*worker["command"], *worker["args"]],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "POD_INDEX": index,
            "GANG_HEAD": told["GANG_HEAD"].replace("$(REPLICA)", REPLICA),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    expected = " ".join(["antiphon worker", *worker["args"], flag.replace("REV", rendered.data.revision)])
    assert answer.stdout.strip() == expected
    assert worker_options(expected.split()[2:]).ray_head is (index == "0")


def test_a_gang_is_one_set_of_as_many_pods_as_it_takes_started_together() -> None:
    gang = render(SPECS["gang"]).of_kind("StatefulSet")[0]["spec"]
    assert (gang["replicas"], gang["podManagementPolicy"], gang["serviceName"]) == (2, "Parallel", "tiny-workers")
    assert render(SPECS["demo"]).of_kind("StatefulSet")[0]["spec"]["replicas"] == 1


def test_the_pods_of_a_gang_know_each_other_by_a_token_in_a_file() -> None:
    rendered = render(SPECS["gang"])
    secret = volumes(rendered.pod())["ray"]["secret"]
    (made,) = (one for one in rendered.of_kind("Secret") if one["metadata"]["name"] == "tiny-ray")
    assert secret["secretName"] == "tiny-ray"
    assert not secret.get("optional")
    assert secret["defaultMode"] == 0o440
    (file,) = (f"/etc/antiphon/ray/{key}" for key in made["data"])
    assert worker_options(rendered.worker()["args"]).ray_token_file == file
    assert mounts(rendered.worker())["/etc/antiphon/ray"]["readOnly"]


def test_joiners_are_told_the_port_that_the_gangs_head_takes() -> None:
    assert names.RAY_PORT == environment_of_ray.HEAD_PORT
    fixed = (environment_of_ray.NODE_MANAGER_PORT, environment_of_ray.OBJECT_MANAGER_PORT)
    ranges = (environment_of_ray.FIRST_WORKER_PORT, environment_of_ray.LAST_WORKER_PORT)
    page = (Path(__file__).parents[3] / "docs" / "parallelism.md").read_text()
    assert f"| {fixed[0]}, {fixed[1]}, {environment_of_ray.RUNTIME_ENV_AGENT_PORT} |" in page
    assert f"| {ranges[0]} to {ranges[1]} |" in page


def test_a_replica_of_one_pod_has_no_token() -> None:
    for name in ("demo", "rdma"):
        assert "ray" not in volumes(render(SPECS[name]).pod())
        assert "--ray-token-file" not in render(SPECS[name]).worker()["args"]


def test_devices_follow_from_the_shape() -> None:
    assert render(SPECS["gang"]).worker()["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert render(SPECS["whole-claim"]).worker()["resources"]["limits"] == {"amd.com/gpu": "1"}
    assert render(SPECS["demo"]).worker()["resources"] == {}
    assert render(SPECS["template"]).worker()["resources"] == {
        "requests": {"cpu": "4", "memory": "8Gi"},
        "limits": {"memory": "8Gi"},
    }


def test_rdma_brings_devices_networks_and_the_lock_to_the_worker_alone() -> None:
    rendered = render(SPECS["rdma"])
    template = rendered.pod("prefill")
    worker = rendered.worker("prefill")
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "2", "rdma/hca": "2"}
    assert template["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "fabric/a,fabric/b"}
    assert worker["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert template["spec"]["initContainers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    none = render({"source": {"uri": "demo"}, "kvCache": {"transfer": {"rdma": {"resource": "none"}}}})
    assert none.worker()["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert none.worker()["resources"] == {}


def test_ephemeral_weights_are_fetched_by_each_pod_into_a_sized_volume_that_the_worker_only_reads() -> None:
    rendered = render(SPECS["ephemeral"])
    template = rendered.pod()
    fetch = template["spec"]["initContainers"][0]
    assert fetch["args"] == ["hf://org/tiny", "--revision", COMMIT, "--to", "/models"]
    assert volumes(template)["weights"] == {"name": "weights", "emptyDir": {"sizeLimit": "80Gi"}}
    assert mounts(fetch)["/models"] == {"name": "weights", "mountPath": "/models"}
    assert mounts(rendered.worker())["/models"]["readOnly"] is True
    assert rendered.worker()["resources"]["requests"]["ephemeral-storage"] == "80Gi"


def test_without_a_size_the_ephemeral_volume_is_a_little_larger_than_the_weights() -> None:
    template = render({"source": {"uri": "hf://org/tiny"}}).pod()
    limit = volumes(template)["weights"]["emptyDir"]["sizeLimit"]
    assert limit.endswith("Mi")
    assert 16_000_000_000 * 1.05 < int(limit.removesuffix("Mi")) * 1024 * 1024 < 16_000_000_000 * 1.25


@pytest.mark.parametrize(
    ("name", "folder", "path"),
    [
        ("claim", f"org--tiny--{COMMIT}", f"/models/org--tiny--{COMMIT}"),
        ("own-claim", "llama/8b", "/models/weights"),
        ("whole-claim", None, "/models/weights"),
    ],
)
def test_weights_in_a_claim_are_only_read(name: str, folder: str | None, path: str) -> None:
    rendered = render(SPECS[name])
    assert volumes(rendered.pod())["weights"]["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}
    mount = mounts(rendered.worker())[path]
    assert (mount.get("subPath"), mount["readOnly"]) == (folder, True)
    assert "initContainers" not in rendered.pod()["spec"]


@pytest.mark.parametrize(
    ("source", "folder", "mounted", "served"),
    [
        ("pvc://weights/llama/8b.gguf", "llama", "/models/weights", "/models/weights/8b.gguf"),
        ("pvc://weights/8b.gguf", None, "/models/weights", "/models/weights/8b.gguf"),
    ],
)
def test_of_a_file_in_a_claim_the_folder_is_mounted(source: str, folder: str | None, mounted: str, served: str) -> None:
    rendered = render({"source": {"uri": source}})
    assert mounts(rendered.worker())[mounted].get("subPath") == folder
    assert rendered.worker()["args"][0] == served


def test_the_hubs_token_proxies_and_certificates_reach_only_what_fetches() -> None:
    ephemeral = {**SPECS["claim"], "source": SPECS["ephemeral"]["source"]}
    fetch = render(ephemeral).pod()["spec"]["initContainers"][0]
    job = render(SPECS["claim"]).of_kind("Job")[0]["spec"]["template"]["spec"]["containers"][0]
    for container in (fetch, job):
        told = environment(container)
        assert told["HF_TOKEN"] == {"secretKeyRef": {"name": "hub-token", "key": "token"}}
        assert told["HTTPS_PROXY"] == told["https_proxy"] == "http://proxy.corp:3128"
        assert told["NO_PROXY"] == told["no_proxy"] == ".corp,localhost,127.0.0.1,.svc,.cluster.local"
        assert told["SSL_CERT_FILE"] == told["REQUESTS_CA_BUNDLE"] == "/etc/antiphon/ca/ca.crt"
        assert mounts(container)["/etc/antiphon/ca"]["name"] == "ca"
    for spec in (ephemeral, SPECS["claim"]):
        told = environment(render(spec).worker())
        assert not {"HF_TOKEN", "HTTPS_PROXY", "https_proxy", "SSL_CERT_FILE"} & set(told)


def test_every_container_has_a_user_a_home_it_can_write_and_traces_where_asked() -> None:
    rendered = render(SPECS["ephemeral"])
    for container in (rendered.worker(), rendered.pod()["spec"]["initContainers"][0]):
        assert environment(container)["USER"]
        assert environment(container)["HOME"] == "/tmp"
        assert mounts(container)["/tmp"]["name"] == "tmp"
    told = environment(rendered.worker())
    assert told["OTEL_EXPORTER_OTLP_ENDPOINT"] == CONTEXT.otlp_endpoint
    assert "antiphon.model=chat/tiny" in told["OTEL_RESOURCE_ATTRIBUTES"]


def test_no_variable_of_ours_is_taken_for_an_option() -> None:
    for name in SPECS:
        assert not [
            variable for variable in environment(render(SPECS[name]).worker()) if variable.startswith("ANTIPHON")
        ]


def test_the_redis_password_is_a_file_that_has_to_be_there() -> None:
    rendered = render(SPECS["demo"])
    secret = volumes(rendered.pod())["redis"]["secret"]
    assert secret["secretName"] == rendered.of_kind("Secret")[0]["metadata"]["name"] == "tiny-redis"
    assert not secret.get("optional")
    assert set(rendered.of_kind("Secret")[0]["data"]) == {"password"}


def test_start_up_may_take_longer_for_larger_models_and_draining_fits_into_the_grace() -> None:
    def startup_s(name: str) -> int:
        probe = render(SPECS[name]).worker()["startupProbe"]
        seconds: int = probe["periodSeconds"] * probe["failureThreshold"]
        return seconds

    assert 300 <= startup_s("demo") < startup_s("ephemeral") < 3600
    worker = render(SPECS["demo"]).worker()
    assert (worker["startupProbe"]["httpGet"]["path"], worker["readinessProbe"]["httpGet"]["path"]) == ("/ready",) * 2
    assert worker["livenessProbe"]["httpGet"]["path"] == "/health"
    assert worker_options(worker["args"]).drain_timeout_s == DRAIN_TIMEOUT_S < TERMINATION_GRACE_S
    assert render(SPECS["demo"]).pod()["spec"]["terminationGracePeriodSeconds"] == TERMINATION_GRACE_S


def test_a_lost_node_is_given_up_after_half_a_minute() -> None:
    tolerations = render(SPECS["demo"]).pod()["spec"]["tolerations"]
    assert {(one["key"], one["tolerationSeconds"]) for one in tolerations} == {
        ("node.kubernetes.io/not-ready", 30),
        ("node.kubernetes.io/unreachable", 30),
    }


def test_closeness_is_a_preference_and_a_gang_holds_together_most() -> None:
    gang = render(SPECS["gang"]).pod()["spec"]["affinity"]["podAffinity"]
    assert list(gang) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    own, model = gang["preferredDuringSchedulingIgnoredDuringExecution"]
    assert own["weight"] > model["weight"]
    assert own["podAffinityTerm"]["labelSelector"]["matchLabels"]["antiphon.dev/replica"] == REPLICA
    assert "antiphon.dev/replica" not in model["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert model["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
    assert "affinity" not in render(SPECS["demo"]).pod()["spec"]
