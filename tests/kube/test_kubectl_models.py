"""The real kubectl with the chart's CRDs: it explains every part of a Model, takes the samples and refuses mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.kube.kubectl import Kubectl, kubectl_on_a_double

ROOT = Path(__file__).parents[2]
CRDS = sorted((ROOT / "charts" / "antiphon" / "templates" / "crds").glob("*.yaml"))
SAMPLES = sorted((ROOT / "deploy" / "samples").glob("*.yaml"))


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    with kubectl_on_a_double(tmp_path_factory.mktemp("kubectl"), CRDS) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("model.spec.decode", "replicas"),
        ("model.spec.source.uri", "hf://"),
        ("model.spec.rollout.surge", "set"),
        ("model.spec.sla.ttft.p95", "no promise"),
        ("model.spec.kvCache.transfer.require", "rdma"),
        ("model.status.conditions", "reason"),
        ("pool.spec.replicas", "replicas"),
    ],
)
def test_explain_teaches(kubectl: Kubectl, path: str, word: str) -> None:
    taught = kubectl("explain", path)
    assert "DESCRIPTION" in taught
    assert word in taught
    assert "<no description>" not in taught.lower()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_the_samples_are_taken_as_they_are(kubectl: Kubectl, sample: Path) -> None:
    documents = [one for one in yaml.safe_load_all(sample.read_text()) if one["kind"] == "Model"]
    assert documents
    kubectl("apply", "-f", "-", text=yaml.safe_dump_all(documents))
    for one in documents:
        assert one["metadata"]["name"] in kubectl("get", "models", "-n", one["metadata"].get("namespace", "default"))


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("{source: {uri: demo}, decode: {replica: 2}}", 'unknown field "spec.decode.replica"'),
        ("{}", "spec.source"),
        ("{source: {uri: demo}, autoscaling: {decode: {min: 4, max: 2}}}", "min"),
        ("{source: {uri: demo}, rollout: {surge: 0, maxUnavailable: 0}}", "surge"),
        ("{source: {uri: demo}, sla: {ttft: {p95: 500}}}", "p95"),
    ],
)
def test_mistakes_are_refused_by_name(kubectl: Kubectl, spec: str, told: str) -> None:
    manifest = f"apiVersion: antiphon.dev/v1alpha1\nkind: Model\nmetadata: {{name: wrong}}\nspec: {spec}\n"
    assert told in kubectl("apply", "-f", "-", text=manifest, code=1)
