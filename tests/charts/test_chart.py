"""The chart: every rendering is valid, wrong values are refused with their name, and what it grants is what is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from antiphon.configuration import load, specs
from antiphon_gateway.options import GatewayOptions
from antiphon_operator.options import OperatorOptions
from antiphon_proto import inference_pb2 as api

from tests.support import chart, manifests
from tests.support.option_words import parsed

VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "listed namespaces": {"operator": {"watchNamespaces": ["chat", "search"], "podMonitors": True, "replicas": 1}},
    "external Redis over TLS": {
        "valkey": {"enabled": False},
        "externalRedis": {"url": "rediss://redis.example:6380/0", "secret": "redis-users"},
    },
    "own secret": {"valkey": {"secret": "mine"}},
    "ingress": {
        "gateway": {
            "ingress": {"enabled": True, "host": "llm.example", "className": "nginx", "tlsSecret": "llm-tls"},
            "apiKeysSecret": "keys",
            "args": ["--queue-size=64"],
        }
    },
    "route": {
        "gateway": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["a.example"]}}
    },
    "gRPC": {
        "gateway": {
            "grpc": {
                "enabled": True,
                "port": 9000,
                "ingressAnnotations": {"nginx.ingress.kubernetes.io/backend-protocol": "GRPC"},
            },
            "ingress": {"enabled": True, "host": "llm.example"},
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
        }
    },
    "no gateway": {"gateway": {"enabled": False}},
    "everything told": {
        "image": {"registry": "registry.example/team/", "tag": "1.2.3", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "pull"}],
        "operator": {"otlpEndpoint": "http://otel:4318", "networkPolicies": False, "workerImage": "mine/worker:7"},
        "gateway": {"preStopSleepSeconds": 0, "service": {"type": "LoadBalancer", "annotations": {"a": "b"}}},
        "networkPolicies": {"enabled": False},
        "rbac": {"aggregate": False},
    },
}

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a name that does not exist": ({"gateway": {"replica": 3}}, "replica"),
    "a text for a number": ({"operator": {"replicas": "two"}}, "replicas"),
    "no operator": ({"operator": {"replicas": 0}}, "replicas"),
    "a registry without its slash": ({"image": {"registry": "registry.example"}}, "registry"),
    "a port that is none": ({"gateway": {"service": {"port": 70000}}}, "port"),
    "a Service of no known type": ({"gateway": {"service": {"type": "External"}}}, "type"),
    "an Ingress without a host": ({"gateway": {"ingress": {"enabled": True}}}, "host"),
    "a route without a parent": ({"gateway": {"httpRoute": {"enabled": True}}}, "parentRefs"),
    "no Redis at all": ({"valkey": {"enabled": False}}, "url"),
    "a password in the Redis URL": (
        {"valkey": {"enabled": False}, "externalRedis": {"url": "redis://me:secret@host/0", "secret": "s"}},
        "url",
    ),
    "a namespace that cannot be": ({"operator": {"watchNamespaces": ["Chat Rooms"]}}, "watchNamespaces"),
    "an unknown level": ({"gateway": {"logLevel": "loud"}}, "logLevel"),
}


def containers(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for one in objects:
        for template in manifests.pod_templates_of(one):
            yield from template["spec"]["containers"]


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_every_rendering_is_valid_on_the_oldest_and_the_newest_kubernetes(values: dict[str, Any]) -> None:
    manifests.assert_valid(chart.render(values))


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_no_pod_asks_for_more_than_the_restricted_level(values: dict[str, Any]) -> None:
    for one in chart.render(values):
        operator = one["metadata"]["name"].endswith("-operator")
        for template in manifests.pod_templates_of(one):
            assert manifests.security_problems(template, token_allowed=operator) == [], one["metadata"]["name"]


def test_helm_lint_finds_nothing() -> None:
    report = helm_python.lint(chart.CHART, strict=True, kube_version="v1.30.0")
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize(("values", "named"), WRONG.values(), ids=WRONG)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        chart.render(values)
    assert named in str(refused.value)


def test_every_value_is_in_the_schema_and_the_other_way_round() -> None:
    with helm_python.Chart.load(chart.CHART) as loaded:
        values, schema = loaded.values, loaded.schema
    assert schema is not None
    unused: list[str] = []

    def compare(value: Any, rules: dict[str, Any], path: str) -> None:
        if "properties" not in rules:
            return
        assert set(value) <= set(rules["properties"]), path
        unused.extend(f"{path}.{name}" for name in set(rules["properties"]) - set(value) - {"global"})
        for name, inner in value.items():
            compare(inner, rules["properties"][name], f"{path}.{name}")

    compare(values, schema, "")
    assert unused == []


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_the_command_lines_are_ones_that_the_processes_take(values: dict[str, Any]) -> None:
    kinds = {"operator": OperatorOptions, "gateway": GatewayOptions}
    seen = set()
    for container in containers(chart.render(values)):
        command, *words = container.get("args", [""])
        if command in kinds:
            seen.add(command)
            options = kinds[command]
            load(options, parsed(specs(options), words), {})
    assert "operator" in seen


def test_the_crds_stay_when_the_release_goes() -> None:
    crds = [one for one in chart.render() if one["kind"] == "CustomResourceDefinition"]
    assert {one["metadata"]["name"] for one in crds} == {"models.antiphon.dev", "pools.antiphon.dev"}
    for one in crds:
        assert one["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_the_operator_may_read_no_secret_and_make_no_pod() -> None:
    for role in (one for one in chart.render() if one["kind"] in ("ClusterRole", "Role")):
        if "aggregate-to-view" in str(role["metadata"]["labels"]):
            continue
        for rule in role["rules"]:
            assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
            if "secrets" in rule["resources"]:
                assert set(rule["verbs"]) == {"create", "patch"}
            if "pods" in rule["resources"]:
                assert set(rule["verbs"]) <= {"get", "list", "watch"}


def test_with_listed_namespaces_nothing_but_reading_nodes_is_granted_cluster_wide() -> None:
    objects = chart.render(VARIANTS["listed namespaces"])
    bound = [one["roleRef"]["name"] for one in objects if one["kind"] == "ClusterRoleBinding"]
    assert bound == ["antiphon-operator-cluster"]
    rules = chart.find(objects, "ClusterRole", "antiphon-operator-cluster")["rules"]
    assert rules == [{"apiGroups": [""], "resources": ["nodes", "namespaces"], "verbs": ["list", "watch"]}]
    bindings = [one["metadata"]["namespace"] for one in objects if one["kind"] == "RoleBinding"]
    assert {"chat", "search"} <= set(bindings)


def test_every_granted_verb_has_its_reason_in_the_documents() -> None:
    page = (chart.ROOT / "docs" / "permissions.md").read_text()
    rows = {
        tuple(cell.strip(" `") for cell in line.strip("|").split("|")[:2]) for line in page.splitlines() if "|" in line
    }
    documented = {(resource, verb.strip(" `")) for resource, verbs in rows for verb in verbs.split(",")}
    for role in (
        one for one in chart.render({"operator": {"podMonitors": True}}) if one["kind"] in ("ClusterRole", "Role")
    ):
        if "aggregate-to" in str(role["metadata"]["labels"]):
            continue
        for rule in role["rules"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    assert (resource, verb) in documented, f"docs/permissions.md says nothing of {verb} {resource}"


def test_passwords_are_made_once_per_rendering_and_stand_nowhere_else() -> None:
    first, second = chart.render(), chart.render()
    secret = chart.find(first, "Secret", "antiphon-redis")["stringData"]
    assert (
        secret["operator-password"] != chart.find(second, "Secret", "antiphon-redis")["stringData"]["operator-password"]
    )
    assert len(secret["gateway-password"]) >= 40
    everything_else = yaml.safe_dump([one for one in first if one["kind"] != "Secret"])
    for name in ("operator-password", "gateway-password", "credentials-key"):
        assert secret[name] not in everything_else
        assert secret[name] not in secret["users.acl"]


def test_the_chart_can_be_packaged_and_the_package_renders(tmp_path: Path) -> None:
    archive = helm_python.package(chart.CHART, destination=tmp_path)
    with helm_python.Chart.load(archive) as loaded:
        assert loaded.name == "antiphon"
        assert loaded.render({}, name="antiphon", namespace="antiphon")


def test_grpc_is_at_its_port_everywhere_or_nowhere() -> None:
    objects = chart.render(VARIANTS["gRPC"])
    (gateway,) = chart.find(objects, "Deployment", "antiphon-gateway")["spec"]["template"]["spec"]["containers"]
    assert "--grpc-port=8001" in gateway["args"]
    assert {"name": "grpc", "containerPort": 8001} in gateway["ports"]
    for name, port in (("antiphon-gateway", 9000), ("antiphon-gateway-pods", 8001)):
        ports = {one["name"]: one for one in chart.find(objects, "Service", name)["spec"]["ports"]}
        assert (ports["grpc"]["port"], ports["grpc"]["targetPort"]) == (port, "grpc")
    (rule,) = chart.find(objects, "NetworkPolicy", "antiphon-gateway")["spec"]["ingress"]
    assert {one["port"] for one in rule["ports"]} == {8000, 8001}
    path = chart.find(objects, "Ingress", "antiphon-gateway-grpc")["spec"]["rules"][0]["http"]["paths"][0]
    assert path["path"] == "/" + api.DESCRIPTOR.services_by_name["Inference"].full_name
    route = chart.find(objects, "GRPCRoute", "antiphon-gateway")["spec"]["rules"][0]
    assert route["backendRefs"][0]["port"] == 9000
    assert "grpc-port" not in yaml.safe_dump(chart.render({}))


def test_the_gateway_goes_only_after_its_longest_stream() -> None:
    objects = chart.render({"gateway": {"longestStreamSeconds": 900, "preStopSleepSeconds": 7}})
    spec = chart.find(objects, "Deployment", "antiphon-gateway")["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] > 900 + 7
    assert "--drain-timeout-s=900" in spec["containers"][0]["args"]
    assert spec["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 7}}}
