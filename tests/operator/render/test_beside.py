"""Objects beside the replicas: network policy, budgets, Service, Pool, and the Job that gets the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from antiphon.fetch import fetch_parser
from antiphon_operator.names import RAY_PORT
from antiphon_operator.options import OperatorContext
from antiphon_operator.render.network import network_policy
from antiphon_operator.render.pool import pool_object
from antiphon_operator.render.source import BAD_INPUT_EXIT
from antiphon_operator.render.weights import SourceResultError, Weights, read_source_result, source_content
from antiphon_telemetry.exit import ExitCode

from tests.support.rendered import COMMIT, CONTEXT, SPECS, model_of, render


def policy(name: str, context: OperatorContext = CONTEXT) -> dict[str, Any]:
    found: dict[str, Any] = network_policy(model_of(SPECS[name]), context)["spec"]
    return found


def ports(rule: dict[str, Any]) -> set[int]:
    return {port["port"] for port in rule["ports"]}


def test_only_pods_of_the_same_model_reach_all_ports() -> None:
    spec = policy("demo")
    own = {"podSelector": {"matchLabels": {"antiphon.dev/model": "tiny"}}}
    everywhere = [rule for rule in spec["ingress"] if "ports" not in rule]
    assert everywhere == [{"from": [own]}]
    assert {"to": [own]} in spec["egress"]
    assert spec["podSelector"] == own["podSelector"]


def test_nothing_but_the_models_own_pods_reaches_a_gangs_ray() -> None:
    (policy,) = render(SPECS["gang"]).of_kind("NetworkPolicy")
    named = [port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())]
    assert RAY_PORT not in named
    assert all("ports" in rule for rule in policy["spec"]["ingress"][1:]), "a rule without ports would open all"


def test_grpc_is_open_to_gateways_and_operators_and_the_status_pages_to_all() -> None:
    spec = policy("demo")
    to_grpc = [rule for rule in spec["ingress"] if 9000 in {port["port"] for port in rule.get("ports", ())}]
    (peer,) = to_grpc[0]["from"]
    assert len(to_grpc) == 1
    assert peer["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "antiphon"}
    assert peer["podSelector"]["matchExpressions"][0]["values"] == ["gateway", "operator"]
    assert [ports(rule) for rule in spec["ingress"] if "from" not in rule] == [{9001}]


def test_outside_only_dns_redis_traces_and_where_weights_come_from_are_reached() -> None:
    def outside(name: str, context: OperatorContext = CONTEXT) -> set[int]:
        return set().union(*(ports(rule) for rule in policy(name, context)["egress"] if "to" not in rule))

    assert outside("demo") == {53, 6379, 4317}
    assert outside("ephemeral") == {53, 6379, 4317, 80, 443}
    assert outside("claim") == {53, 6379, 4317, 80, 443, 3128}
    elsewhere = OperatorContext("0.1.0", "worker:1", "rediss://redis.example:7000/0", "", otlp_endpoint="https://otlp")
    assert outside("own-claim", elsewhere) == {53, 7000, 443}


def test_at_most_one_pod_of_a_pool_is_evicted_at_a_time_and_broken_ones_always() -> None:
    budgets = render(SPECS["demo-pair"]).of_kind("PodDisruptionBudget")
    assert [budget["metadata"]["name"] for budget in budgets] == ["tiny-prefill", "tiny-decode"]
    for budget in budgets:
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "Service", "PodMonitor"])
def test_selectors_find_the_workers_and_not_the_job(kind: str) -> None:
    rendered = render(SPECS["ephemeral"])
    worker = rendered.pod("decode")["metadata"]["labels"]
    job = rendered.of_kind("Job")[0]["spec"]["template"]["metadata"]["labels"]
    selector = rendered.of_kind(kind)[-1]["spec"]["selector"]
    wanted = selector.get("matchLabels", selector)
    assert wanted.items() <= worker.items()
    assert not wanted.items() <= job.items()


def test_the_service_names_pods_from_before_they_are_ready() -> None:
    service = render(SPECS["demo"]).of_kind("Service")[0]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)


def test_a_pool_whose_size_another_manager_owns_is_applied_without_it() -> None:
    model = model_of(SPECS["demo"])
    assert pool_object(model, model.pools[0], 3)["spec"] == {"role": "decode", "replicas": 3}
    assert pool_object(model, model.pools[0], None)["spec"] == {"role": "decode"}
    assert pool_object(model, model.pools[0], 0)["spec"]["replicas"] == 0


def test_a_job_resolves_for_ephemeral_caches_and_fetches_for_claims() -> None:
    def told(name: str) -> tuple[Any, dict[str, Any]]:
        pod = render(SPECS[name]).of_kind("Job")[0]["spec"]["template"]["spec"]
        return fetch_parser().parse_args(pod["containers"][0]["args"]), pod

    resolving, pod = told("ephemeral")
    assert (resolving.resolve_only, resolving.revision) == (True, "")
    assert not [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    fetching, pod = told("claim")
    assert (fetching.resolve_only, fetching.revision, fetching.uri) == (False, "v1", "hf://org/tiny")
    assert {"name": "weights", "persistentVolumeClaim": {"claimName": "weights"}} in pod["volumes"]
    for given in (resolving, fetching):
        assert (given.to, given.termination_log) == (Path("/models"), Path("/dev/termination-log"))


def test_models_without_a_hub_need_no_job() -> None:
    assert not [name for name in ("demo", "timed", "own-claim") if render(SPECS[name]).of_kind("Job")]


def test_a_job_ends_at_once_where_trying_again_cannot_help() -> None:
    job = render(SPECS["claim"]).of_kind("Job")[0]["spec"]
    rule = job["podFailurePolicy"]["rules"][0]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["values"] == [BAD_INPUT_EXIT] == [ExitCode.BAD_INPUT]
    assert job["backoffLimit"] > 0
    assert "ttlSecondsAfterFinished" not in job


def test_another_source_is_another_job() -> None:
    source = SPECS["claim"]["source"]
    others = [{**source, "revision": "v2"}, {**source, "uri": "hf://org/other"}]
    assert len({source_content(model_of({"source": one})) for one in (source, *others)}) == 3
    replicas = {"source": source, "decode": {"replicas": 9}}
    assert source_content(model_of(replicas)) == source_content(model_of({"source": source}))


def test_what_a_job_found_is_read_from_its_last_words() -> None:
    for path in (f"/models/org--tiny--{COMMIT}", f"/models/org--tiny--a.gguf--{COMMIT}/a.gguf"):
        found = Weights(revision=COMMIT, size_bytes=5, path=path)
        assert read_source_result(json.dumps(vars_of(found))) == found


@pytest.mark.parametrize(
    "message",
    [
        "org/tiny is gated: accept its terms",
        "",
        "[]",
        json.dumps({"revision": "main", "size_bytes": 5, "path": "/models/x"}),
        json.dumps({"revision": COMMIT, "size_bytes": 5, "path": "/models/../etc"}),
        json.dumps({"revision": COMMIT, "size_bytes": 5, "path": "/models/x/../../etc/a.gguf"}),
        json.dumps({"revision": COMMIT, "size_bytes": 5, "path": "/models/x/y"}),
    ],
)
def test_anything_else_is_an_error_that_shows_it(message: str) -> None:
    with pytest.raises(SourceResultError) as caught:
        read_source_result(message)
    assert message in str(caught.value)


def vars_of(weights: Weights) -> dict[str, Any]:
    return {"revision": weights.revision, "size_bytes": weights.size_bytes, "path": weights.path}
