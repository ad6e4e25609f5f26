"""Judges custom resources as an API server does, by the CRDs of the chart: defaults, schema, rules.

Apart from the test double on purpose: `jsonschema` reads the schema and `cel-python` the rules, so that what the
types are turned into is read by somebody else's code.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import celpy
import jsonschema
import yaml
from celpy import celtypes

ROOT = Path(__file__).parents[2]
CRD_FOLDER = ROOT / "charts/antiphon/templates/crds"
SAMPLE_FOLDER = ROOT / "deploy/samples"

Json = dict[str, Any]


@cache
def crd(plural: str) -> Json:
    """A CRD as it stands in the chart: `models` or `pools`."""
    found: Json = yaml.safe_load((CRD_FOLDER / f"{plural}.yaml").read_text())
    return found


def schema(plural: str) -> Json:
    return crd(plural)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def samples() -> dict[str, list[Json]]:
    """File name -> its documents."""
    return {path.name: list(yaml.safe_load_all(path.read_text())) for path in sorted(SAMPLE_FOLDER.glob("*.yaml"))}


def sample_models() -> dict[str, Json]:
    """File name -> the Model in it."""
    return {name: next(doc for doc in docs if doc["kind"] == "Model") for name, docs in samples().items()}


def model(spec: Mapping[str, Any], name: str = "a-model") -> Json:
    return {
        "apiVersion": "antiphon.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": name, "namespace": "chat", "uid": "11111111-2222-3333-4444-555555555555", "generation": 1},
        "spec": copy.deepcopy(dict(spec)),
    }


def with_defaults(plural: str, resource: Mapping[str, Any]) -> Json:
    """A copy with the CRD's defaults in it."""
    filled: Json = copy.deepcopy(dict(resource))
    _fill(schema(plural), filled)
    return filled


def _fill(at: Mapping[str, Any], value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _fill(at.get("items", {}), item)
    if isinstance(value, dict):
        for name, inner in at.get("properties", {}).items():
            if "default" in inner:
                value.setdefault(name, copy.deepcopy(inner["default"]))
            if name in value:
                _fill(inner, value[name])


def unknown_fields(at: Mapping[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """Paths of what the schema does not have, which `kubectl apply` refuses."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_fields(at["items"], item, f"{path}[{index}]")
    if isinstance(value, dict) and "properties" in at and path != ".metadata":
        for name, inner in value.items():
            if name not in at["properties"]:
                yield f"{path}.{name}"
            else:
                yield from unknown_fields(at["properties"][name], inner, f"{path}.{name}")


def refusals(plural: str, resource: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> list[str]:
    """`path: sentence` for all that an API server would refuse; rules only where the schema is kept, as there."""
    filled = with_defaults(plural, resource)
    validator = jsonschema.Draft202012Validator(schema(plural))
    faults = [f"{error.json_path[2:]}: {error.message}" for error in validator.iter_errors(filled)]
    faults += [f"{path.lstrip('.')}: unknown field" for path in unknown_fields(schema(plural), resource)]
    return faults or list(_broken(schema(plural), filled, before, ""))


def _broken(at: Mapping[str, Any], value: Any, before: Any, path: str) -> Iterator[str]:
    for rule in at.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"] and before is None:
            continue
        if not evaluate(rule["rule"], value, before):
            yield f"{path.lstrip('.')}: {rule['message']}"
    if isinstance(value, dict):
        earlier = before if isinstance(before, dict) else {}
        for name, inner in at.get("properties", {}).items():
            if name in value:
                yield from _broken(inner, value[name], earlier.get(name), f"{path}.{name}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken(at["items"], item, None, f"{path}[{index}]")


@cache
def _program(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def evaluate(rule: str, value: Any, before: Any = None) -> bool:
    """Whether a rule holds. An error in the rule is an error of the test that asks."""
    known = {"self": _cel(value)} | ({} if before is None else {"oldSelf": _cel(before)})
    return bool(_program(rule).evaluate(known))


def _cel(value: Any) -> Any:
    match value:
        case bool():
            return celtypes.BoolType(value)
        case int():
            return celtypes.IntType(value)
        case str():
            return celtypes.StringType(value)
        case list():
            return celtypes.ListType([_cel(item) for item in value])
        case dict():
            return celtypes.MapType({celtypes.StringType(key): _cel(item) for key, item in value.items()})
    raise TypeError(f"a resource has no {type(value).__name__}")
