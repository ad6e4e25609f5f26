"""The real kubectl, as it is, against the double in a process of its own: what people type works."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures"
ROOT = Path(__file__).parents[2]
KUBECTL = Path(sys.executable).with_name("kubectl")
DEADLINE_S = 30
WIDGET = """
apiVersion: conformance.antiphon.dev/v1
kind: Widget
metadata: {name: w}
spec: {size: SIZE}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose `config` leads to a running double that has the widgets."""
    folder = tmp_path_factory.mktemp("kubectl")
    command = [sys.executable, "-m", "tests.support.kube", "--kubeconfig", str(folder / "config")]
    process = subprocess.Popen(
        [*command, str(FIXTURES / "widgets.yaml")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("serving at http://127.0.0.1:"), first + process.stdout.read()
        yield folder
    finally:
        process.terminate()
        assert process.wait(DEADLINE_S) == 0


def kubectl(home: Path, *arguments: str, text: str = "", code: int = 0) -> str:
    environment = {"KUBECONFIG": str(home / "config"), "HOME": str(home), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [str(KUBECTL), *arguments],
        input=text,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def apply(home: Path, size: str, *arguments: str, code: int = 0) -> str:
    return kubectl(home, "apply", *arguments, "-f", "-", text=WIDGET.replace("SIZE", size), code=code)


def test_apply_get_scale_and_delete(home: Path) -> None:
    assert apply(home, "small") == "widget.conformance.antiphon.dev/w created\n"
    assert apply(home, "small") == "widget.conformance.antiphon.dev/w unchanged\n"
    assert apply(home, "large") == "widget.conformance.antiphon.dev/w configured\n"
    assert kubectl(home, "get", "wd").splitlines()[0].split() == ["NAME", "SIZE", "READY"]
    assert kubectl(home, "get", "wd").splitlines()[1].split() == ["w", "large"]
    kubectl(home, "scale", "widget", "w", "--replicas=3")
    assert kubectl(home, "get", "widget", "w", "-o", "jsonpath={.spec.replicas}") == "3"
    assert "Warning" not in kubectl(home, "describe", "widget", "w")
    conflict = apply(home, "small", "--server-side", "--field-manager=other", code=1)
    assert 'conflict with "kubectl-client-side-apply"' in conflict
    apply(home, "small", "--server-side", "--field-manager=other", "--force-conflicts")
    status = '{"status":{"conditions":[{"type":"Ready","status":"True"}]}}'
    kubectl(home, "patch", "widget", "w", "--subresource=status", "--type=merge", "-p", status)
    kubectl(home, "wait", "widget", "w", "--for=condition=Ready", "--timeout=10s")
    kubectl(home, "delete", "widget", "w", "--timeout=10s")
    assert "No resources found" in kubectl(home, "get", "widgets")


def test_explain_teaches_the_fields(home: Path) -> None:
    taught = kubectl(home, "explain", "widget.spec.size")
    assert "How large." in taught
    assert "small" in taught


def test_a_wrong_field_is_refused_with_its_name(home: Path) -> None:
    refused = apply(home, "small, nonsense: 1", code=1)
    assert 'unknown field "spec.nonsense"' in refused
    refused = apply(home, "huge", code=1)
    assert 'spec.size: Unsupported value: "huge": supported values: "small", "large"' in refused


def test_a_built_in_object_is_edited(home: Path) -> None:
    deployment = """
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
         "spec": {"selector": {"matchLabels": {"app": "web"}}, "template": {"metadata": {"labels": {"app": "web"}},
                  "spec": {"containers": [{"name": "web", "image": "x:1"}]}}}}
    """
    kubectl(home, "apply", "-f", "-", text=deployment)
    kubectl(home, "set", "image", "deployment/web", "web=x:2")
    kubectl(home, "label", "deployment", "web", "a=b")
    path = "jsonpath={.spec.template.spec.containers[0].image} {.metadata.labels.a} {.metadata.generation}"
    assert kubectl(home, "get", "deploy", "web", "-o", path) == "x:2 b 2"
    kubectl(home, "delete", "deployment", "web", "--timeout=10s")
