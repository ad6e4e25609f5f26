"""The samples in `deploy/samples/` are what they say: valid, and together they show every field."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
from antiphon_operator.names import pool_name
from antiphon_operator.resource.changes import leaves
from antiphon_operator.resource.checks import check
from antiphon_operator.resource.effective import effective_dict
from antiphon_operator.resource.parse import parse_model

from tests.support import crds

MODELS = crds.sample_models()


@pytest.mark.parametrize("name", MODELS)
def test_a_sample_is_accepted(name: str) -> None:
    assert crds.refusals("models", MODELS[name]) == []
    assert check(parse_model(MODELS[name])) == []


@pytest.mark.parametrize("name", MODELS)
def test_the_api_servers_defaults_are_the_operators(name: str) -> None:
    assert parse_model(crds.with_defaults("models", MODELS[name])).spec == parse_model(MODELS[name]).spec


@pytest.mark.parametrize("name", MODELS)
def test_what_is_in_force_is_a_valid_spec_that_means_the_same(name: str) -> None:
    model = parse_model(MODELS[name])
    echoed = effective_dict(model)
    again = parse_model({**MODELS[name], "spec": echoed})
    assert crds.refusals("models", {**MODELS[name], "spec": echoed}) == []
    assert effective_dict(again) == echoed
    assert (again.pools, again.names, again.accelerator)[1:] == (model.names, model.accelerator)
    assert [pool.pods for pool in again.pools] == [pool.pods for pool in model.pools]


def test_other_objects_in_the_samples_are_valid() -> None:
    others = [doc for docs in crds.samples().values() for doc in docs if doc["kind"] != "Model"]
    assert {doc["kind"] for doc in others} == {"PersistentVolumeClaim", "HorizontalPodAutoscaler"}
    for doc in others:
        for version in ("1.30", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(doc, version, strict=True)


def test_the_autoscaler_of_the_sample_scales_the_pool_of_its_model() -> None:
    model, autoscaler = crds.samples()["external-scaling.yaml"]
    target = autoscaler["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": "antiphon.dev/v1alpha1",
        "kind": crds.crd("pools")["spec"]["names"]["kind"],
        "name": pool_name(model["metadata"]["name"], "decode"),
    }
    assert model["spec"]["autoscaling"]["mode"] == "External"


def test_the_demo_has_ten_lines() -> None:
    assert len((crds.SAMPLE_FOLDER / "demo.yaml").read_text().splitlines()) <= 10


def test_one_sample_shows_every_field() -> None:
    written = set(_written(MODELS["every-field.yaml"]["spec"], ""))
    assert {leaf.path for leaf in leaves()} <= written


def _written(value: Any, path: str) -> list[str]:
    if not isinstance(value, dict):
        return [path]
    inner = [one for key, item in value.items() for one in _written(item, f"{path}.{key}" if path else key)]
    return [path, *inner]
