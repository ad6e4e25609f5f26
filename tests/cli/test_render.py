"""`antiphon render`: what it prints, and how it says what is wrong with a file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from antiphon.render import run_render
from antiphon_telemetry.exit import ExitCode

from tests.support.manifests import assert_valid, pod_templates_of, security_problems

DEMO = """\
apiVersion: antiphon.dev/v1alpha1
kind: Model
metadata: {name: chat}
spec:
  source: {uri: demo}
  prefill: {replicas: 2}
  decode: {replicas: 3}
"""
HUB = """\
apiVersion: antiphon.dev/v1alpha1
kind: Model
metadata: {name: large, namespace: prod}
spec:
  source:
    uri: hf://org/large
    cache: {type: Claim, claimName: weights}
"""
WRONG = """\
apiVersion: antiphon.dev/v1alpha1
kind: Model
metadata: {name: chat}
spec:
  source:
    uri: s3://bucket/model
  decode:
    replica: 2
    replicas: many
    resources:
      requests:
        nvidia.com/gpu: [1]
  sla: {ttft: {p95: 500}}
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    return str(path)


def test_the_children_of_a_model_are_printed_as_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_render([written(tmp_path, DEMO), "--namespace", "team"]) == ExitCode.OK
    manifests = list(yaml.safe_load_all(capsys.readouterr().out))
    kinds = [manifest["kind"] for manifest in manifests]
    assert kinds.count("StatefulSet") == 5
    assert {"Pool", "ControllerRevision", "Service", "ServiceAccount", "NetworkPolicy"} <= set(kinds)
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"team"}
    assert len({(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}) == len(manifests)
    assert_valid(manifests)
    assert not [problem for one in manifests for pod in pod_templates_of(one) for problem in security_problems(pod)]


def test_the_same_file_gives_the_same_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, DEMO)
    run_render([path])
    first = capsys.readouterr().out
    run_render([path])
    assert capsys.readouterr().out == first


def test_a_model_of_the_hub_is_rendered_up_to_its_replicas_and_what_is_stood_in_for_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_render([written(tmp_path, HUB), "--output", "json"]) == ExitCode.OK
    out, err = capsys.readouterr()
    items = json.loads(out)["items"]
    assert {"Job", "StatefulSet"} <= {item["kind"] for item in items}
    assert {item["metadata"]["namespace"] for item in items} == {"prod"}
    assert "0000000000" in err
    assert "large-redis" in err


def test_several_models_and_standard_input() -> None:
    command = [sys.executable, "-m", "antiphon", "render", "-"]
    answer = subprocess.run(command, input=f"{DEMO}---\n{HUB}", capture_output=True, text=True, check=True)
    manifests = list(yaml.safe_load_all(answer.stdout))
    assert {manifest["metadata"]["labels"]["antiphon.dev/model"] for manifest in manifests} == {"chat", "large"}


def test_objects_of_other_kinds_are_passed_over_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, f"kind: ConfigMap\n---\n{DEMO}")
    assert run_render([path]) == ExitCode.OK
    out, err = capsys.readouterr()
    assert "ConfigMap" not in {manifest["kind"] for manifest in yaml.safe_load_all(out)}
    assert f"{path}:1: a ConfigMap is passed over" in err


def test_all_problems_are_told_with_their_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, WRONG)
    assert run_render([path]) == ExitCode.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    problems = [line.removeprefix(f"{path}:") for line in err.splitlines()]
    assert [problem.partition(": ")[0] for problem in problems] == ["6", "8", "9", "12", "13"]
    assert "write hf://organisation/name" in problems[0]
    assert "there is no such field; did you mean replicas?" in problems[1]
    assert "'many' is not of type integer" in problems[2]
    assert "neither a number nor a text" in problems[3]
    assert "500 is not of type string; quote it" in problems[4]


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("spec: [", 1, "this is not YAML"),
        ("", None, "there is no Model in it"),
        ("kind: Pod\napiVersion: v1\n", None, "there is no Model in it"),
        (DEMO.replace("v1alpha1", "v9"), 2, "write apiVersion: antiphon.dev/v1alpha1"),
        ("apiVersion: antiphon.dev/v1alpha1\nkind: Model\nmetadata: {name: a}\n", 1, "spec: it is missing"),
        (DEMO.replace("  source: {uri: demo}\n", ""), 4, "it has no source"),
        (DEMO.replace("name: chat", "name: Chat_1"), 3, "metadata.name"),
        (DEMO.replace("{uri: demo}", "{uri: demo, revision: v1}"), 5, "revision goes with an hf:// source only"),
        (f"{DEMO}  kvCache:\n    tiers: [{{type: host, size: 1Gi}}]\n", 9, "remove tiers"),
        (DEMO + "---\n" + DEMO.replace("{replicas: 3}", "{replicas: -1}"), 15, "-1 is not between 0 and 1000"),
        (
            f"{DEMO}  engine:\n    args:\n    - --threads=2\n    - --port=1\n",
            11,
            "--port=1 may not be given here",
        ),
    ],
)
def test_each_kind_of_problem_names_its_line(
    text: str, line: int | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, text)
    assert run_render([path]) == ExitCode.BAD_INPUT
    (told,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"{re.escape(path)}:{'' if line is None else f'{line}: '}", told), told
    assert sentence in told


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_render([str(tmp_path / "nothing.yaml")]) == ExitCode.BAD_INPUT
    assert "nothing.yaml cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(Path("deploy/samples").rglob("*.yaml")), ids=lambda path: path.name)
def test_every_sample_is_rendered_into_what_api_servers_take(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_render([str(path)])
    out, err = capsys.readouterr()
    assert code == ExitCode.OK, err
    assert_valid(yaml.safe_load_all(out))
