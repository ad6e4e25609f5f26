"""The CRDs: valid for an API server, bounded, described, and as the types say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import re2
from antiphon_operator.resource import crd, generated, reference
from antiphon_operator.resource.reasons import CONDITION_MEANINGS, REASON_MEANINGS, ConditionType, Reason

from tests.support import crds

PLURALS = ("models", "pools")
KEYWORDS = {
    "type", "description", "properties", "required", "items", "additionalProperties", "default", "enum", "format",
    "minimum", "maximum", "minLength", "maxLength", "maxItems", "maxProperties", "pattern", "anyOf",
    "x-kubernetes-validations", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
}  # fmt: skip
UNSTRUCTURED = {"spec.prefill.podTemplate", "spec.decode.podTemplate", "status.effective"}


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}" if path else name)
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


@pytest.mark.parametrize("plural", PLURALS)
@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_the_crd_is_valid_for_the_oldest_and_the_newest_api_server(plural: str, version: str) -> None:
    kubernetes_validate.validate(crds.crd(plural), version, strict=True)


@pytest.mark.parametrize("plural", PLURALS)
def test_the_schema_is_structural(plural: str) -> None:
    for path, node in nodes(crds.schema(plural)):
        assert set(node) <= KEYWORDS, path
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert node.get("anyOf", []) in ([], [{"type": "integer"}, {"type": "string"}]), path
        assert not ("properties" in node and "additionalProperties" in node), path


@pytest.mark.parametrize("plural", PLURALS)
def test_everything_is_bounded_so_that_no_rule_costs_without_limit(plural: str) -> None:
    for path, node in nodes(crds.schema(plural)):
        if path in ("apiVersion", "kind"):
            continue
        if node.get("type") == "string":
            assert "maxLength" in node or "enum" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        if node.get("x-kubernetes-preserve-unknown-fields"):
            assert path in UNSTRUCTURED


@pytest.mark.parametrize("plural", PLURALS)
def test_every_field_is_described(plural: str) -> None:
    for path, node in nodes(crds.schema(plural)):
        for name, inner in node.get("properties", {}).items():
            if path != "metadata" and name != "metadata":
                assert inner.get("description", "").strip(), f"{path}.{name}"


@pytest.mark.parametrize("plural", PLURALS)
def test_rules_call_only_what_kubernetes_1_30_has(plural: str) -> None:
    assert reference.called_functions(crds.schema(plural)) <= set(reference.CEL_FUNCTIONS)


@pytest.mark.parametrize("plural", PLURALS)
def test_patterns_are_read_by_the_api_servers_regular_expressions(plural: str) -> None:
    for path, node in nodes(crds.schema(plural)):
        if "pattern" in node:
            assert re2.compile(node["pattern"]), path


def test_a_default_keeps_the_rules_as_it_stands() -> None:
    """An API server tries an object's rules on the default before it fills in anything."""
    for path, node in nodes(crds.schema("models")):
        if isinstance(node.get("default"), dict):
            for rule in node.get("x-kubernetes-validations", ()):
                assert crds.evaluate(rule["rule"], node["default"]), path
            assert list(crds.unknown_fields(node, node["default"])) == [], path


def test_a_status_has_no_defaults() -> None:
    for plural in PLURALS:
        assert all("default" not in node for path, node in nodes(crds.schema(plural)) if path.startswith("status"))


def test_the_crds_outlive_the_release_and_stay_out_of_kubectl_get_all() -> None:
    for plural in PLURALS:
        assert crds.crd(plural)["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert crds.crd(plural)["spec"]["names"]["categories"] == ["antiphon"]


def test_the_chart_can_take_the_files_as_templates() -> None:
    for plural in PLURALS:
        assert "{{" not in (crds.CRD_FOLDER / f"{plural}.yaml").read_text()


def test_kubectls_columns_show_fields_that_there_are() -> None:
    for plural in PLURALS:
        known = {path for path, _ in nodes(crds.schema(plural))} | {"metadata.creationTimestamp"}
        for column in crds.crd(plural)["spec"]["versions"][0]["additionalPrinterColumns"]:
            path = column["jsonPath"].lstrip(".").replace('[?(@.type=="Ready")]', "[]")
            assert path in known, column


def test_a_pool_can_be_scaled() -> None:
    scale = crds.crd("pools")["spec"]["versions"][0]["subresources"]["scale"]
    known = {f".{path}" for path, _ in nodes(crds.schema("pools"))}
    assert set(scale.values()) <= known


def test_files_and_types_are_equal() -> None:
    assert generated.stale(crds.CRD_FOLDER, crd.crd_files()) == [], "run python -m antiphon_operator.resource.crd"
    assert generated.stale(crds.ROOT / "docs", reference.pages()) == [], (
        "run python -m antiphon_operator.resource.reference"
    )


@pytest.mark.parametrize("made", [crd, reference])
def test_the_check_tells_files_that_are_not_current(made: Any, tmp_path: Path) -> None:
    folder = ["--folder", str(tmp_path)]
    assert made.main([*folder, "--check"]) == 1
    assert made.main(folder) == 0
    assert made.main([*folder, "--check"]) == 0
    next(tmp_path.iterdir()).write_text("edited by hand")
    assert made.main([*folder, "--check"]) == 1


def test_every_condition_and_reason_has_a_meaning() -> None:
    assert set(CONDITION_MEANINGS) == set(ConditionType)
    assert set(REASON_MEANINGS) == set(Reason)
