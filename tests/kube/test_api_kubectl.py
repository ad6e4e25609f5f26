"""The real kubectl, as it is, against the double in a process of its own: what people type works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kube.kubectl import Kubectl, kubectl_on_a_double

FIXTURES = Path(__file__).parent / "fixtures"
WIDGET = """
apiVersion: conformance.antiphon.dev/v1
kind: Widget
metadata: {name: w}
spec: {size: SIZE}
"""


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    with kubectl_on_a_double(tmp_path_factory.mktemp("kubectl"), [FIXTURES / "widgets.yaml"]) as running:
        yield running


def apply(kubectl: Kubectl, size: str, *arguments: str, code: int = 0) -> str:
    return kubectl("apply", *arguments, "-f", "-", text=WIDGET.replace("SIZE", size), code=code)


def test_apply_get_scale_and_delete(kubectl: Kubectl) -> None:
    assert apply(kubectl, "small") == "widget.conformance.antiphon.dev/w created\n"
    assert apply(kubectl, "small") == "widget.conformance.antiphon.dev/w unchanged\n"
    assert apply(kubectl, "large") == "widget.conformance.antiphon.dev/w configured\n"
    assert kubectl("get", "wd").splitlines()[0].split() == ["NAME", "SIZE", "READY"]
    assert kubectl("get", "wd").splitlines()[1].split() == ["w", "large"]
    kubectl("scale", "widget", "w", "--replicas=3")
    assert kubectl("get", "widget", "w", "-o", "jsonpath={.spec.replicas}") == "3"
    assert "Warning" not in kubectl("describe", "widget", "w")
    conflict = apply(kubectl, "small", "--server-side", "--field-manager=other", code=1)
    assert 'conflict with "kubectl-client-side-apply"' in conflict
    apply(kubectl, "small", "--server-side", "--field-manager=other", "--force-conflicts")
    status = '{"status":{"conditions":[{"type":"Ready","status":"True"}]}}'
    kubectl("patch", "widget", "w", "--subresource=status", "--type=merge", "-p", status)
    kubectl("wait", "widget", "w", "--for=condition=Ready", "--timeout=10s")
    kubectl("delete", "widget", "w", "--timeout=10s")
    assert "No resources found" in kubectl("get", "widgets")


def test_explain_teaches_the_fields(kubectl: Kubectl) -> None:
    taught = kubectl("explain", "widget.spec.size")
    assert "How large." in taught
    assert "small" in taught


def test_a_wrong_field_is_refused_with_its_name(kubectl: Kubectl) -> None:
    refused = apply(kubectl, "small, nonsense: 1", code=1)
    assert 'unknown field "spec.nonsense"' in refused
    refused = apply(kubectl, "huge", code=1)
    assert 'spec.size: Unsupported value: "huge": supported values: "small", "large"' in refused


def test_a_built_in_object_is_edited(kubectl: Kubectl) -> None:
    deployment = """
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
         "spec": {"selector": {"matchLabels": {"app": "web"}}, "template": {"metadata": {"labels": {"app": "web"}},
                  "spec": {"containers": [{"name": "web", "image": "x:1"}]}}}}
    """
    kubectl("apply", "-f", "-", text=deployment)
    kubectl("set", "image", "deployment/web", "web=x:2")
    kubectl("label", "deployment", "web", "a=b")
    path = "jsonpath={.spec.template.spec.containers[0].image} {.metadata.labels.a} {.metadata.generation}"
    assert kubectl("get", "deploy", "web", "-o", path) == "x:2 b 2"
    kubectl("delete", "deployment", "web", "--timeout=10s")
